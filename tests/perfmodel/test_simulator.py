"""Simulation of three streams that wait for one another."""

from dataclasses import replace
from itertools import pairwise

import pytest
from llama_plans import LLAMA_8B, TINY, plan_of

from llmb.perfmodel.offload.buffers import ParamBuckets, buffer_bytes
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.simulator import simulate

RESIDENT = plan_of(
    resident_params=38, resident_grads=38, resident_states=38, param_blocks=0, grad_blocks=0, state_blocks=0,
    inp_slots=33, kv_slots=32, attn_slots=32, rest_slots=32, levels="F" * 32,
)  # fmt: skip


def test_nothing_moves_when_all_is_on_the_device():
    simulation = simulate(LLAMA_8B, RESIDENT, H200)
    assert (simulation.inbound_bytes, simulation.outbound_bytes, simulation.host_slots) == (0, 0, {})
    assert simulation.step_s == pytest.approx(simulation.compute_s)


@pytest.mark.parametrize("update_at", ["forward", "backward"])
def test_weights_gradients_and_state_cross_the_link_as_often_as_they_must(update_at):
    """Plenty of slots for activations, no bucket resident, two buffers of each kind more than the head needs."""
    plan = replace(
        RESIDENT, resident_params=0, resident_grads=0, resident_states=0, param_blocks=5, grad_blocks=5, state_blocks=2,
        update_at=update_at,
    )  # fmt: skip
    simulation, sizes = simulate(LLAMA_8B, plan, H200), buffer_bytes(LLAMA_8B, plan)
    buckets = ParamBuckets(LLAMA_8B).count
    vocabulary = buckets - 32
    params = plan.rounds * (2 * 32 + vocabulary)
    grads = (plan.rounds - 1) * buckets + (buckets if update_at == "forward" else 0)
    most = params * sizes["param"] + grads * sizes["grad"] + buckets * sizes["state"]
    saved = (2 * 5 * plan.rounds + 2 * 5) * sizes["param"]  # what is still there where the way turns round
    assert most - 2 * saved <= simulation.inbound_bytes <= most
    out = buckets * (sizes["param"] + sizes["state"]) + grads * sizes["grad"]
    assert out - saved <= simulation.outbound_bytes <= out


@pytest.mark.slow
def test_no_stream_is_faster_than_its_work():
    for levels in ("F", "A", "I"):
        simulation = simulate(LLAMA_8B, plan_of(levels=levels * 32, rest_slots=3), H200)
        assert simulation.step_s >= max(simulation.compute_s, simulation.inbound_s, simulation.outbound_s)


def test_a_slow_link_bounds_the_step():
    slow = replace(H200, link_in_gbs=5.0, link_out_gbs=5.0, link_both_gbs=5.0)
    simulation = simulate(LLAMA_8B, plan_of(), slow)
    assert simulation.inbound_s / simulation.step_s > 0.95


def test_skipped_rounds_count_like_the_simulated_one():
    few, many = (simulate(LLAMA_8B, plan_of(gbs=gbs), H200) for gbs in (2 * 3, 2 * 13))
    between = simulate(LLAMA_8B, plan_of(gbs=2 * 8), H200)
    assert (few.step_s + many.step_s) / 2 == pytest.approx(between.step_s, rel=1e-9)
    assert (few.inbound_bytes + many.inbound_bytes) / 2 == pytest.approx(between.inbound_bytes)


def test_events_are_two_steps_on_all_streams_in_order():
    plan = plan_of(
        seqlen=32, gbs=4, chunk_tokens=16, seqs_per_group=1, groups_per_round=2, levels="FAIFAIFAIFAI", rest_slots=2
    )
    events = simulate(TINY, plan, H200, with_events=True).events
    assert {event.step for event in events} == {0, 1}
    for stream in ("compute", "inbound", "outbound"):
        mine = [event for event in events if event.stream == stream]
        assert all(a.end <= b.start for a, b in pairwise(mine))
        assert all(event.end > event.start for event in mine)
    assert {"recompute", "backward", "forward", "head", "update"} <= {s.name for s in events if s.stream == "compute"}
    assert all(event.layer is None or 0 <= event.layer < 3 for event in events)
