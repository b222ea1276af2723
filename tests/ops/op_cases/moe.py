"""Cases of the ops in llmb/ops/moe."""

from dataclasses import replace

import torch
from torch import Generator, Tensor, device

from llmb.config.model import MoEConfig
from llmb.ops.moe.expert_dispatch import assign_send_rows, sort_received_rows
from llmb.ops.moe.expert_weights import ExpertFormat, ExpertWeights, empty_expert_weights, fill_expert_rows
from llmb.ops.moe.fused_moe import Routing, fused_moe
from llmb.ops.moe.permute import permute, sort_by_expert, unpermute, unpermute_backward
from llmb.ops.moe.router import route
from llmb.ops.quant.activation_quant import quantize_activation
from op_cases import Arguments, cases, full_size_cases, randn

ROUTING_RULES = {
    "grouped sigmoid": MoEConfig(count=256, top_k=8, ffn=1, groups=8, top_groups=4, score="sigmoid", scale=2.5),
    "softmax": MoEConfig(count=8, top_k=2, ffn=1, renormalise=False),
    "no powers of two": MoEConfig(count=30, top_k=5, ffn=1, groups=6, top_groups=3, score="sigmoid", renormalise=False),
    "one expert per group": MoEConfig(count=6, top_k=3, ffn=1, groups=6, top_groups=4, scale=0.5),
    "all experts": MoEConfig(count=5, top_k=5, ffn=1),
}
# Tokens, experts per token, experts, channels, sometimes routed tokens that are dropped.
PERMUTATIONS = (
    *((13, 1, 4, 64), (9, 8, 16, 96), (11, 3, 5, 53), (5, 2, 3, 1100), (1, 4, 9, 32), (6, 2, 2, 1)),
    (9, 3, 4, 40, 5),
)


FULL_SIZE = {  # DeepSeek, Grok, an expert for each token, one token, odd
    "tokens": ((65536, 8, 256), (8192, 2, 8), (4099, 1, 32), (1, 8, 256)),
    "rows": ((1025, 8, 256, 7168), (515, 2, 8, 6144), (300, 1, 4, 4096), (1, 8, 16, 7168), (77, 3, 5, 1001)),
}
FLOATS = (torch.float32, torch.bfloat16)


def uneven_topk_ids(g: Generator, d: device, tokens: int, top_k: int, experts: int) -> Tensor:
    """Low experts are selected more often and, where there are others, the last one never."""
    likely = torch.arange(experts, 0, -1.0).square()
    if top_k < experts:
        likely[-1] = 0
    return likely.expand(tokens, -1).multinomial(top_k, generator=g).to(d)


def row_map(g: Generator, d: device, tokens: int, top_k: int, experts: int, dropped: int) -> tuple[Tensor, int]:
    """Return rows sorted by expert, -1 instead of the last ones, and their number."""
    row_map_NK, _ = sort_by_expert.reference(uneven_topk_ids(g, d, tokens, top_k, experts), experts)
    rows = tokens * top_k - dropped
    return row_map_NK.where(row_map_NK < rows, -1), rows


@cases(sort_by_expert, *(shape[:3] for shape in PERMUTATIONS), (0, 2, 3), (300, 2, 5), (50, 8, 256), tolerance=0)
@full_size_cases(sort_by_expert, *FULL_SIZE["tokens"], tolerance=0, exact=None)
def pairs(g: Generator, d: device, tokens: int, top_k: int, experts: int) -> Arguments:
    return (uneven_topk_ids(g, d, tokens, top_k, experts), experts), {}


@cases(permute, *((dtype, *shape) for dtype in (torch.float32, torch.bfloat16) for shape in PERMUTATIONS), tolerance=0)
@full_size_cases(
    permute, *((dtype, *shape) for dtype in FLOATS for shape in FULL_SIZE["rows"]), tolerance=0, exact=None
)
def tokens_to_rows(
    g: Generator, d: device, dtype: torch.dtype, tokens: int, top_k: int, experts: int, channels: int, dropped: int = 0
) -> Arguments:
    row_map_NK, rows = row_map(g, d, tokens, top_k, experts, dropped)
    return (randn(g, d, tokens, channels, dtype=dtype), row_map_NK, rows), {}


@cases(unpermute, *((*flags, *shape) for shape in PERMUTATIONS for flags in ((0, 0), (1, 1))), tolerance=1e-5)
@cases(unpermute, *((1, 0, *shape, 0, torch.bfloat16) for shape in PERMUTATIONS[:4]), tolerance=2**-7)
@full_size_cases(
    unpermute,
    *((*flags, *shape, 0, dtype) for flags in ((0, 0), (1, 1)) for shape in FULL_SIZE["rows"] for dtype in FLOATS),
    tolerance=1e-6,
)
def rows_to_tokens(
    g: Generator, d: device, weighted: bool, added: bool,
    tokens: int, top_k: int, experts: int, channels: int, dropped: int = 0, dtype: torch.dtype = torch.float32,
) -> Arguments:  # fmt: skip
    row_map_NK, rows = row_map(g, d, tokens, top_k, experts, dropped)
    weights_NK = randn(g, d, tokens, top_k).abs() if weighted else None
    addend_NC = randn(g, d, tokens, channels, dtype=dtype) if added else None
    return (randn(g, d, rows, channels, dtype=dtype), row_map_NK, weights_NK, addend_NC), {}


@cases(unpermute_backward, *PERMUTATIONS, tolerance=1e-5)
@cases(unpermute_backward, *((*shape, 0, torch.bfloat16) for shape in PERMUTATIONS[:4]), tolerance=2**-7)
@full_size_cases(
    unpermute_backward, *((*shape, 0, dtype) for shape in FULL_SIZE["rows"] for dtype in FLOATS), tolerance=1e-5
)
def token_gradients(
    g: Generator, d: device, tokens: int, top_k: int, experts: int, channels: int, dropped: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Arguments:  # fmt: skip
    row_map_NK, rows = row_map(g, d, tokens, top_k, experts, dropped)
    dout_NC, rows_MC = randn(g, d, tokens, channels, dtype=dtype), randn(g, d, rows, channels, dtype=dtype)
    return (dout_NC, rows_MC, row_map_NK, randn(g, d, tokens, top_k).abs()), {}


# Tokens, experts per token, ranks, experts of each, rows of each.
@cases(assign_send_rows, (24, 2, 4, 2, 48), (24, 2, 4, 2, 16), (700, 3, 3, 5, 640), (8, 1, 8, 1, 2), tolerance=0)
def send_buffer(g: Generator, d: device, tokens: int, top_k: int, ranks: int, experts: int, rows: int) -> Arguments:
    topk_ids_NK = uneven_topk_ids(g, d, tokens, top_k, ranks * experts)
    row_map_NK, ends_E = sort_by_expert.reference(topk_ids_NK, ranks * experts)
    return (topk_ids_NK, row_map_NK, ends_E.view(ranks, experts), rows, torch.ones((), device=d)), {}


# Ranks, experts, rows of each rank.
@cases(sort_received_rows, (2, 1, 16), (8, 4, 48), (3, 5, 300), (2, 256, 64), (1, 3, 7), tolerance=0)
def received_rows(g: Generator, d: device, ranks: int, experts: int, rows: int) -> Arguments:
    ends_BE = torch.randint(rows + 1, (ranks, experts), generator=g, dtype=torch.int32).sort(1).values
    return (ends_BE.to(d), ranks * rows), {}


@cases(fused_moe, (1, "plain"), (17, "plain"), (0, "plain"), (17, "nvfp4"), tolerance=1e-5)
@cases(fused_moe, (7, "plain", 48, 80), (7, "nvfp4", 96, 160), tolerance=1e-5)  # partial blocks
@cases(fused_moe, (3, "per_token"), (3, "1x128"), tolerance=5e-3)
def routed_tokens(
    g: Generator, d: device, tokens: int, expert_format: ExpertFormat, hidden: int = 256, ffn: int = 128
) -> Arguments:
    gate_up = expert_weights(g, d, (5, 2 * ffn, hidden), expert_format)
    down = expert_weights(g, d, (5, hidden, ffn), expert_format)
    weights_NK = torch.rand(tokens, 2, generator=g).to(d)
    routing = Routing(weights_NK, uneven_topk_ids(g, d, tokens, 2, 5), experts=5)
    x = quantize_activation.reference(randn(g, d, tokens, hidden), gate_up.quant_format)
    return (x, routing, gate_up, down, "silu" if hidden == 256 else "gelu", torch.float32), {}


@cases(fused_moe, ("plain", 3, 48, 80), ("mxfp4", 5, 64, 96), ("mxfp4", 40, 256, 128), tolerance=1e-5)
@cases(fused_moe, ("per_token", 3, 256, 128), ("1x128", 3, 256, 128), tolerance=5e-3)
def experts_with_biases(
    g: Generator, d: device, expert_format: ExpertFormat, tokens: int, hidden: int, ffn: int
) -> Arguments:
    """The experts of gpt-oss."""
    gate_up = expert_weights(g, d, (4, 2 * ffn, hidden), expert_format)._replace(bias=randn(g, d, 4, 2 * ffn))
    down = expert_weights(g, d, (4, hidden, ffn), expert_format)._replace(bias=randn(g, d, 4, hidden))
    routing = Routing(torch.rand(tokens, 2, generator=g).to(d), uneven_topk_ids(g, d, tokens, 2, 4), experts=4)
    x = quantize_activation.reference(randn(g, d, tokens, hidden), gate_up.quant_format)
    return (x, routing, gate_up, down, "swigluoai", torch.float32), {}


@cases(fused_moe, tolerance=1e-5)
def tokens_routed_twice_to_one_expert(g: Generator, d: device) -> Arguments:
    """No router selects this, but a row of padding may hold anything."""
    routing = Routing(torch.rand(20, 2, generator=g).to(d), torch.zeros(20, 2, dtype=torch.int64, device=d), 8)
    gate_up, down = (expert_weights(g, d, shape, "plain") for shape in ((1, 64, 32), (1, 32, 32)))
    return (randn(g, d, 20, 32), routing, gate_up, down, "silu", torch.float32), {}


def expert_weights(g: Generator, d: device, shape: tuple[int, int, int], expert_format: ExpertFormat) -> ExpertWeights:
    weights = empty_expert_weights(shape, expert_format, torch.float32, torch.device("cpu"))
    for expert in range(shape[0]):
        fill_expert_rows(weights, expert, 0, randn(g, torch.device("cpu"), *shape[1:], scale=0.1 * (expert + 1)))
    return ExpertWeights(weights.format, *(None if tensor is None else tensor.to(d) for tensor in weights[1:]))


# The order of K is undefined: top_k > 1 is compared in test_router.py.
@cases(route, *((name, tokens) for name in ROUTING_RULES for tokens in (1, 5)), tolerance=1e-5)
def best_expert(g: Generator, d: device, name: str, tokens: int) -> Arguments:
    rule = replace(ROUTING_RULES[name], top_k=1)
    logits_NE = 2 * torch.randn(tokens, rule.count, generator=g)
    bias_E = torch.randn(rule.count, generator=g) / 4 if rule.score == "sigmoid" else None
    slot_mapping_N = torch.arange(tokens, device=d) - 1
    return (logits_NE.to(d), None if bias_E is None else bias_E.to(d), rule, slot_mapping_N), {}
