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
from llmb.ops.quant.delayed_scaling import CurrentScaling, DelayedScaling, Scaling

CPU = torch.device("cpu")
NAMES = OperandNames("x", "weight", "dy")


def scaling_of(kind: type[Scaling], dtypes: dict[str, torch.dtype], ranks: int) -> Scaling:
    if ranks == 1:
        return kind(dtypes, CPU, None)
    dist.init_process_group("gloo")
    return kind(dtypes, CPU, partial(dist.all_reduce, op=dist.ReduceOp.MAX))


def sharded_linear(rank: int, kind: type[Scaling], ranks: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Return outputs and gradients of four steps of a column-parallel layer, and the state of its scales.

    Each rank has some rows of the weight; in the last step those of the first rank have a NaN.
    """
    scaling, generator, steps = scaling_of(kind, NAMES.dtypes, ranks), torch.Generator().manual_seed(80), []
    x = torch.randn(32, 48, generator=generator).bfloat16().requires_grad_()
    rows = torch.randn(64, 48, generator=generator) * 0.02 * (1 + torch.arange(64)[:, None])
    dy = (torch.randn(32, 64, generator=generator) * 1e-6).bfloat16()
    for step in range(4):
        if step == 3:
            rows[0, 0] = math.nan
        weight = (rows * (1 + step)).chunk(ranks)[rank].requires_grad_()
        out = fp8_linear(x, weight, scaling, NAMES)
        gradients = torch.autograd.grad(out, (x, weight), dy.chunk(ranks, dim=1)[rank].contiguous())
        steps.append([out.detach(), *gradients])
        if step < 3:
            scaling.update()
    return steps, scaling.state_dict()


@pytest.mark.parametrize("kind", [DelayedScaling, CurrentScaling])
def test_ranks_of_a_sharded_weight_scale_and_round_as_one_process(kind: type[Scaling]) -> None:
    equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    whole, state = sharded_linear(0, kind, 1)
    ranks, states = zip(*on_ranks(2, sharded_linear, kind, 2), strict=True)
    for rank_state in states:
        equal(rank_state, state)
    for (out, grad_x, grad_weight), *shards in zip(whole, *ranks, strict=True):
        equal(torch.cat([shard[0] for shard in shards], dim=1), out)
        equal(torch.cat([shard[2] for shard in shards]), grad_weight)
        if not grad_x.isnan().any():
            exact = grad_x.double()
            assert (sum(shard[1] for shard in shards).double() - exact).norm() < 0.01 * exact.norm()  # two bf16 numbers
    assert out.isnan().all() == (kind is CurrentScaling)  # a delayed scale is that of the steps before
