"""Plans that fit, are fast, and do as they are told."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_plans import LLAMA_8B, SHORT, TINY

from llmb.config.offload_plan import PlanConstraints
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.machine_rates import H200, NOMINAL_CPU, known_rates
from llmb.perfmodel.offload.plan_search import best_plan as uncached_best_plan

CONSTRAINTS = PlanConstraints(dtype="bf16", seqlen=8192, host_gib=60, device_gib=24)
LESS = replace(CONSTRAINTS, host_gib=24, device_gib=10)  # for the short one
MIB = 1 / 1024
best_plan = cache(uncached_best_plan)


@pytest.mark.slow
def test_8b_in_24_gib_beats_the_published_speed():
    """9,478 tokens/s on an H100, whose plan computes nearly every attention again."""
    result = best_plan(LLAMA_8B, CONSTRAINTS, H200)
    assert result.plan.step_tokens / result.simulation.step_s > 9_600
    assert result.plan.levels.count("I") < len(result.plan.levels) / 4


@pytest.mark.slow
def test_nothing_moves_or_is_recomputed_where_all_fits():
    result = best_plan(SHORT, replace(CONSTRAINTS, device_gib=100), H200)
    assert set(result.plan.levels) == {"F"}
    assert result.simulation.inbound_bytes == 0
    assert sum(result.host_bytes.values()) == 0


@pytest.mark.slow
def test_global_batch_is_the_users():
    assert best_plan(SHORT, replace(LESS, gbs=7), H200).plan.gbs == 7
    free = best_plan(SHORT, LESS, H200)
    assert 400_000 < free.plan.step_tokens < 700_000


def test_fixed_choices_are_respected():
    constraints = replace(
        LESS, host_gib=60, device_gib=24, chunk_tokens=8192, seqs_per_round=2, resident_params=3, resident_grads=1,
        resident_states=2, activation_slots=4, full_saves=3, attention_saves=5,
    )  # fmt: skip
    plan = best_plan(SHORT, constraints, H200).plan
    assert (plan.chunk_tokens, plan.groups_per_round * plan.seqs_per_group) == (8192, 2)
    assert (plan.resident_params, plan.resident_grads, plan.resident_states) == (3, 1, 2)
    assert (plan.levels[-4:], plan.levels[:-4].count("F"), plan.levels.count("A")) == ("FFFF", 3, 5)


@pytest.mark.slow
def test_clipping_waits_for_all_gradients():
    assert best_plan(SHORT, replace(LESS, clip=1.0), H200).plan.update_at == "forward"
    assert best_plan(SHORT, LESS, H200).plan.update_at == "backward"


@pytest.mark.nightly  # by day of a smaller model: tests/cli/test_plan_command.py
def test_a_prime_length_has_a_shorter_last_chunk():
    plan = best_plan(SHORT, replace(LESS, seqlen=65_537, host_gib=50, device_gib=20), H200).plan
    assert plan.chunks_per_group > 1
    assert (plan.chunks_per_group - 1) * plan.chunk_tokens < 65_537 <= plan.chunks_per_group * plan.chunk_tokens


@pytest.mark.slow
def test_too_small_budget_is_one_line_with_the_minimum():
    with pytest.raises(ConfigError) as error:
        best_plan(SHORT, replace(LESS, host_gib=5), H200)
    message = str(error.value)
    assert "short at 8192 tokens does not fit into 5 GiB of host memory and 10 GiB of device memory" in message
    needed = int(message.split("with 10 GiB on the device it needs ")[1].split()[0])
    assert best_plan(SHORT, replace(LESS, host_gib=needed), H200)
    with pytest.raises(ConfigError):
        best_plan(SHORT, replace(LESS, host_gib=needed - 2), H200)


NOTHING_RESIDENT = replace(
    CONSTRAINTS, seqlen=64, device_gib=1.2 * MIB, gbs=2, chunk_tokens=64, seqs_per_round=1, resident_params=0,
    resident_grads=0, resident_states=0,
)  # fmt: skip


def test_a_disk_takes_what_the_host_cannot_hold_state_before_weights():
    model = replace(TINY, layers=16)

    def placed(host_mib, disk_gib=1.0):
        constraints = replace(NOTHING_RESIDENT, host_gib=host_mib * MIB, disk_gib=disk_gib)
        result = best_plan(model, constraints, NOMINAL_CPU)
        assert sum(result.host_bytes.values()) <= constraints.host_gib * GIB
        assert sum(result.disk_bytes.values()) <= disk_gib * GIB
        assert (result.simulation.disk_read_bytes > 0) == result.plan.uses_disk
        return result

    assert placed(2) == placed(2, disk_gib=0.0)  # not even if it would be faster
    states = placed(1.2).plan
    assert (states.disk_params, 0 < states.disk_states < 20) == (0, True)
    both = placed(0.8)
    assert (both.plan.disk_params > 0, both.plan.disk_states) == (True, 20)
    assert "staging" in both.host_bytes
    with pytest.raises(ConfigError) as error:
        placed(0.8, disk_gib=0.5 * MIB)
    assert "GiB of device memory and 0.000488281 GiB of disk: " in str(error.value)
    assert str(error.value).endswith("with both as they are it needs 1 GiB on disk")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"disk_gib": -1}, "disk_gib must be 0 GiB or more, got -1"),
        ({"host_gib": 0}, "host_gib must be more than 0 GiB, got 0"),
        ({"device_gib": -1}, "device_gib must be more than 0 GiB, got -1"),
        ({"gbs": 0}, "gbs must be 1 or more, got 0"),
        ({"chunk_tokens": 10_000}, "chunk_tokens=10000 must hold whole sequences of 8192 tokens; try 8192"),
    ],
)
def test_bad_constraints_are_refused_in_one_line(changed, words):
    with pytest.raises(ConfigError, match=words):
        best_plan(LLAMA_8B, replace(CONSTRAINTS, **changed), H200)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    seqlen=st.integers(5, 200), host=st.floats(0.3, 4), device=st.floats(0.2, 3), gbs=st.integers(1, 5),
    chunk=st.sampled_from([None, 16, 50]), update=st.sampled_from(["master", "stochastic", "nearest"]),
    disk=st.sampled_from([0, 9]),
)  # fmt: skip
def test_a_plan_is_within_its_budgets(seqlen, host, device, gbs, chunk, update, disk):
    if chunk is not None and seqlen < chunk:
        chunk = chunk // seqlen * seqlen
    budgets = {"host_gib": host * MIB, "device_gib": device * MIB, "disk_gib": disk * MIB}
    constraints = replace(CONSTRAINTS, seqlen=seqlen, **budgets, gbs=gbs, chunk_tokens=chunk, update=update)
    try:
        result = best_plan(TINY, constraints, NOMINAL_CPU)
    except ConfigError:
        return
    assert sum(result.host_bytes.values()) <= constraints.host_gib * GIB
    assert sum(result.device_bytes.values()) <= constraints.device_gib * GIB
    assert sum(result.disk_bytes.values()) <= constraints.disk_gib * GIB
    assert result.plan.gbs == gbs


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", *(pytest.param(gpu, marks=pytest.mark.nightly) for gpu in ("a100", "b200"))])
def test_other_gpus_have_plans_too(gpu):
    result = best_plan(SHORT, LESS, known_rates(gpu))
    assert result.simulation.step_s > 0
