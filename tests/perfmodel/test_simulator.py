"""Three lanes that wait for one another."""

from dataclasses import replace
from itertools import pairwise

import pytest
from llama_plans import LLAMA_8B, TINY, plan_of

from llmb.perfmodel.offload.buffers import Units, piece_bytes
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.simulator import simulate

RESIDENT = plan_of(
    resident_params=38, resident_grads=38, resident_states=38, param_blocks=0, grad_blocks=0, state_blocks=0,
    inp_slots=33, kv_slots=32, attn_slots=32, rest_slots=32, levels="F" * 32,
)  # fmt: skip


def test_nothing_moves_when_all_is_on_the_device():
    simulated = simulate(LLAMA_8B, RESIDENT, H200)
    assert (simulated.inbound_bytes, simulated.outbound_bytes, simulated.home_slots) == (0, 0, {})
    assert simulated.step_s == pytest.approx(simulated.compute_s)


@pytest.mark.parametrize("update_at", ["forward", "backward"])
def test_weights_gradients_and_state_cross_the_link_as_often_as_they_must(update_at):
    """Plenty of slots for activations, no unit resident, two buffers of each kind more than the head needs."""
    plan = replace(
        RESIDENT, resident_params=0, resident_grads=0, resident_states=0, param_blocks=5, grad_blocks=5, state_blocks=2,
        update_at=update_at,
    )  # fmt: skip
    simulated, sizes, units = simulate(LLAMA_8B, plan, H200), piece_bytes(LLAMA_8B, plan), Units(LLAMA_8B).count
    vocabulary = units - 32
    params = plan.rounds * (2 * 32 + vocabulary)
    grads = (plan.rounds - 1) * units + (units if update_at == "forward" else 0)
    most = params * sizes["param"] + grads * sizes["grad"] + units * sizes["state"]
    kept = (2 * 5 * plan.rounds + 2 * 5) * sizes["param"]  # what is still there where the way turns round
    assert most - 2 * kept <= simulated.inbound_bytes <= most
    out = units * (sizes["param"] + sizes["state"]) + grads * sizes["grad"]
    assert out - kept <= simulated.outbound_bytes <= out


def test_no_lane_is_faster_than_its_work():
    for levels in ("F", "A", "I"):
        simulated = simulate(LLAMA_8B, plan_of(levels=levels * 32, rest_slots=3), H200)
        assert simulated.step_s >= max(simulated.compute_s, simulated.inbound_s, simulated.outbound_s)


def test_a_slow_link_bounds_the_step():
    slow = replace(H200, link_in_gbs=5.0, link_out_gbs=5.0, link_both_gbs=5.0)
    simulated = simulate(LLAMA_8B, plan_of(), slow)
    assert simulated.inbound_s / simulated.step_s > 0.95


def test_rounds_that_are_not_gone_through_are_like_the_one_that_is():
    few, many = (simulate(LLAMA_8B, plan_of(gbs=gbs), H200) for gbs in (2 * 3, 2 * 13))
    between = simulate(LLAMA_8B, plan_of(gbs=2 * 8), H200)
    assert (few.step_s + many.step_s) / 2 == pytest.approx(between.step_s, rel=1e-9)
    assert (few.inbound_bytes + many.inbound_bytes) / 2 == pytest.approx(between.inbound_bytes)


def test_what_is_shown_is_two_steps_on_all_lanes_in_order():
    plan = plan_of(
        seqlen=32, gbs=4, chunk_tokens=16, seqs_per_group=1, groups_per_round=2, levels="FAIFAIFAIFAI", rest_slots=2
    )
    stretches = simulate(TINY, plan, H200, shown=True).stretches
    assert {stretch.step for stretch in stretches} == {0, 1}
    for lane in ("compute", "inbound", "outbound"):
        mine = [stretch for stretch in stretches if stretch.lane == lane]
        assert all(a.end <= b.start for a, b in pairwise(mine))
        assert all(stretch.end > stretch.start for stretch in mine)
    assert {"recompute", "backward", "forward", "head", "update"} <= {s.name for s in stretches if s.lane == "compute"}
    assert all(stretch.layer is None or 0 <= stretch.layer < 3 for stretch in stretches)
