"""fp8 scales of tensors that ranks share are those of one process.

Not in tests/ops, which a GPU run collects: a process whose autograd has threads for a GPU cannot fork ranks.
"""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks
from torch import Tensor

from llmb.ops.gemm.fp8_linear import OperandNames, fp8_linear
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import CurrentScaling, DelayedScaling, Scaling
from llmb.ops.quant.fp8_quant import E5M2, quantize_fp8

CPU = torch.device("cpu")
NAMES = OperandNames("x", "weight", "dy")


def scaling_of(kind: type[Scaling], dtypes: dict[str, torch.dtype], ranks: int) -> Scaling:
    if ranks == 1:
        return kind(dtypes, CPU, None)
    dist.init_process_group("gloo")
    return kind(dtypes, CPU, partial(dist.all_reduce, op=dist.ReduceOp.MAX))


def sharded_scales(rank: int, kind: type[Scaling], ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the scales of each step and the state: each rank has some columns of every tensor."""
    scales = scaling_of(kind, {"x": E4M3, "w": E4M3, "dx": E5M2}, ranks)
    generator, used = torch.Generator().manual_seed(0), []
    for step in range(4):
        for name in ("x", "w", "dx"):
            whole = torch.randn(8, 32, generator=generator) * 10.0**step
            if (step, name) == (3, "dx"):
                whole[0, 0] = math.nan  # of the first rank only
            shard = whole.chunk(ranks, dim=1)[rank].contiguous()
            (scale_amax,) = scales.scale_amax_of(name, measure=partial(quantize_fp8, shard))
            quantize_fp8(shard, scale_amax)
            used.append(scale_amax.scale.item())
        if step < 3:
            scales.update()
    return used, scales.state_dict()


@pytest.mark.parametrize("kind", [DelayedScaling, CurrentScaling])
def test_ranks_have_the_scales_of_one_process(kind: type[Scaling]) -> None:
    used, state = sharded_scales(0, kind, 1)
    for rank_used, rank_state in on_ranks(2, sharded_scales, kind, 2):
        torch.testing.assert_close(rank_used, used, rtol=0, atol=0, equal_nan=True)
        assert rank_state.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(rank_state[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert math.isnan(used[-1]) == (kind is CurrentScaling)


def sharded_linear(rank: int, kind: type[Scaling], ranks: int) -> list[list[Tensor]]:
    """Return outputs and gradients of three steps of a column-parallel layer: each rank has some rows of the weight."""
    scaling, generator, steps = scaling_of(kind, NAMES.dtypes, ranks), torch.Generator().manual_seed(80), []
    x = torch.randn(32, 48, generator=generator).bfloat16().requires_grad_()
    rows = torch.randn(64, 48, generator=generator) * 0.02 * (1 + torch.arange(64)[:, None])
    dy = (torch.randn(32, 64, generator=generator) * 1e-6).bfloat16()
    for step in range(3):
        weight = (rows * (1 + step)).chunk(ranks)[rank].requires_grad_()
        out = fp8_linear(x, weight, scaling, NAMES)
        gradients = torch.autograd.grad(out, (x, weight), dy.chunk(ranks, dim=1)[rank].contiguous())
        steps.append([out.detach(), *gradients])
        scaling.update()
    return steps


@pytest.mark.parametrize("kind", [DelayedScaling, CurrentScaling])
def test_ranks_of_a_sharded_weight_round_as_one_process(kind: type[Scaling]) -> None:
    whole = sharded_linear(0, kind, 1)
    ranks = on_ranks(2, sharded_linear, kind, 2)
    for (out, _, grad_weight), *shards in zip(whole, *ranks, strict=True):
        assert torch.equal(torch.cat([shard[0] for shard in shards], dim=1), out)
        assert torch.equal(torch.cat([shard[2] for shard in shards]), grad_weight)
    (_, grad_x, _), *shards = (steps[-1] for steps in (whole, *ranks))
    exact = grad_x.double()
    assert (sum(shard[1] for shard in shards).double() - exact).norm() < 0.01 * exact.norm()  # two bf16 numbers
