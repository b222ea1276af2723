"""GEMMs of one layer on one rank, by shape, and the inefficiency of a shape on a given number of SMs.

A GEMM of m x n x k is one forward product, one for the gradient of its input (m x k x n) and one for that of its weight
(n x k x m). Its tiles run in waves of one per SM: on average half a wave is lost, and each tile spends `FILL_K` steps
of K filling its pipeline. A GEMM that overlaps with a TP collective is one for each of its tp chunks.
"""

import math
from dataclasses import dataclass
from typing import Literal

from llmb.config.model import Model
from llmb.perfmodel.step_time.step_setup import StepSetup

TILE_M, TILE_N = 128, 256  # of the largest CUTLASS and cuBLAS tiles on Hopper and Blackwell
FILL_K = 128  # values of K loaded before the first product of a tile
FILL_K_OF = {
    "native": 0
}  # engines that choose algorithms by trial: narrow GEMMs of Llama 1B are as fast as those of 70B
LOST_WAVES = 0.5
CHUNK_LOST_WAVES = 0.25  # of each further chunk of a GEMM: the next one, on another stream, fills half of its last wave


@dataclass(frozen=True)
class Gemm:
    """Product of an m x k activation with a k x n weight, `count` times in a layer."""

    m: float
    n: float
    k: float
    count: float = 1.0
    low: bool = True  # in the dtype of the run; otherwise bf16
    tp_split: Literal["", "columns", "rows"] = ""  # of the weight: its input is gathered, or its output scattered
    routed: bool = False  # of the routed experts

    @property
    def macs(self) -> float:
        return self.count * self.m * self.n * self.k

    @property
    def weights(self) -> float:
        return self.count * self.n * self.k


def padded_flops(
    m: float, n: float, k: float, count: float, sms: int, ragged: bool = False, fill_k: int = FILL_K, chunks: int = 1
) -> float:
    """Return the FLOPs of `count` GEMMs run together, with those of partial tiles, lost waves and pipeline fill.

    `ragged`: m is the mean of uneven numbers of rows, each of which leaves half a tile empty on average.
    `chunks`: parts of m computed one after another.
    16,384 x 4,096 x 4,096 on 132 SMs: 2,048 tiles in 15.5 waves lose 0.5, 3.2 %; filling 128 of 4,096 costs 3.1 %.
    """
    used_m = m + TILE_M / 2 if ragged else math.ceil(m / TILE_M) * TILE_M
    used_n = math.ceil(n / TILE_N) * TILE_N if n > TILE_N else math.ceil(2 * n / TILE_N) * TILE_N / 2
    waves = count * max(1.0, m / TILE_M) * max(1.0, used_n / TILE_N) / sms
    lost = LOST_WAVES + (chunks - 1) * CHUNK_LOST_WAVES
    return 2.0 * count * used_m * used_n * k * (1 + min(1.0, lost / waves)) * (1 + fill_k / k)


def block_gemms(setup: StepSetup, kind: str) -> list[Gemm]:
    """Return the forward GEMMs of one block of a kind, on one rank and for one micro-batch."""
    return {
        "attention": _attention,
        "mla": _mla,
        "mlp": _mlp,
        "experts": _experts,
        "mamba": _mamba,
        "delta_net": _delta_net,
    }[kind](setup, setup.shape.model)


def head_gemms(setup: StepSetup) -> list[Gemm]:
    """Return the LM head of every predicted token, in bf16, and the projection that joins MTP's two inputs."""
    model, tp, depth = setup.shape.model, setup.parallel.tp, setup.shape.mtp_depth
    head = Gemm(setup.tokens, model.vocab / tp, model.hidden, low=False)
    return [head] * (1 + depth) + [Gemm(setup.tokens, model.hidden / tp, 2 * model.hidden)] * depth


def expert_rows(setup: StepSetup) -> float:
    """Return the routed tokens of one local expert in a micro-batch, with balanced routing."""
    experts, split = setup.shape.model.experts, setup.parallel
    assert experts is not None
    return setup.tokens / split.tp * split.ep * split.etp * experts.top_k / experts.count


def _attention(setup: StepSetup, model: Model) -> list[Gemm]:
    width, kv_width, tp = model.heads * model.head_dim, model.kv_heads * model.head_dim, setup.parallel.tp
    queries = width * (1 + model.output_gate)
    return [
        Gemm(setup.tokens, (queries + 2 * kv_width) / tp, model.hidden, tp_split="columns"),
        Gemm(setup.tokens, model.hidden, width / tp, tp_split="rows"),
    ]


def _mla(setup: StepSetup, model: Model) -> list[Gemm]:
    assert model.mla is not None
    ranks, tokens, tp = model.mla, setup.tokens, setup.parallel.tp
    key, value = ranks.nope_dim + ranks.rope_dim, ranks.value_dim
    latents = [width for width in (ranks.q_rank, ranks.kv_rank + ranks.rope_dim) if width]
    return [
        *(Gemm(tokens / tp, width, model.hidden) for width in latents),
        Gemm(tokens, model.heads * key / tp, ranks.q_rank or model.hidden, tp_split="columns"),
        Gemm(tokens, model.heads * (ranks.nope_dim + value) / tp, ranks.kv_rank, tp_split="columns"),
        Gemm(tokens, model.hidden, model.heads * value / tp, tp_split="rows"),
    ]


def _mlp(setup: StepSetup, model: Model) -> list[Gemm]:
    return _projections(setup.tokens, model.hidden, model.ffn / setup.parallel.tp, model.gated)


def _experts(setup: StepSetup, model: Model) -> list[Gemm]:
    assert model.experts is not None
    experts, split = model.experts, setup.parallel
    width = experts.latent or model.hidden
    routed = _projections(expert_rows(setup), width, experts.ffn / split.etp, model.gated, experts.count / split.ep)
    router = [Gemm(setup.tokens / split.tp, experts.count, model.hidden, low=False)]
    if experts.latent:
        tokens = setup.tokens / split.tp
        routed += [Gemm(tokens, experts.latent, model.hidden), Gemm(tokens, model.hidden, experts.latent)]
    shared = (
        _projections(setup.tokens, model.hidden, experts.shared * experts.ffn / split.tp, model.gated)
        if experts.shared
        else []
    )
    return router + routed + shared


def _projections(m: float, hidden: int, width: float, gated: bool, experts: float | None = None) -> list[Gemm]:
    """Up and down projection, of an MLP or of several routed experts together, which gather no tokens over tp."""
    up = width * (2 if gated else 1)
    if experts is not None:
        return [Gemm(m, up, hidden, experts, routed=True), Gemm(m, hidden, width, experts, routed=True)]
    return [Gemm(m, up, hidden, tp_split="columns"), Gemm(m, hidden, width, tp_split="rows")]


def _mamba(setup: StepSetup, model: Model) -> list[Gemm]:
    assert model.mamba is not None
    m, tp = model.mamba, setup.parallel.tp
    inner = m.heads * m.head_dim
    return [
        Gemm(setup.tokens, (2 * inner + 2 * m.groups * m.state + m.heads) / tp, model.hidden, tp_split="columns"),
        Gemm(setup.tokens, model.hidden, inner / tp, tp_split="rows"),
    ]


def _delta_net(setup: StepSetup, model: Model) -> list[Gemm]:
    assert model.delta_net is not None
    d, tp = model.delta_net, setup.parallel.tp
    keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
    gates, low_rank = values + d.value_heads, list[Gemm]()
    if d.gate_rank:
        gates = 2 * d.gate_rank
        low_rank = [Gemm(setup.tokens, width / tp, d.gate_rank) for width in (keys, values)]
    return [
        Gemm(setup.tokens, (2 * keys + values + d.value_heads + gates) / tp, model.hidden, tp_split="columns"),
        *low_rank,
        Gemm(setup.tokens, model.hidden, values / tp, tp_split="rows"),
    ]
