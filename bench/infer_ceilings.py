"""What a serving step cannot be faster than: for each class of kernels its bytes over the bandwidth or its FLOPs over
the rate, whichever takes longer; classes follow one another on a device, so their times add up.

    sum(term.seconds(rates) for term in terms(model, precision, steady_step(isl=1000, osl=1000, batch=960)))

Bytes and FLOPs follow from `llmb.perfmodel.flops`, bandwidth and rates are measured beside the engine (`infer_rates.py`). Only
what must be moved counts: weights and cached tokens once a step, no activations. Attention, MLPs and experts; no Mamba.
"""

from dataclasses import dataclass, replace
from typing import Literal

from llmb.config.spec import Model, Precision
from llmb.perfmodel.block_costs import BlockCost, block_stack
from llmb.perfmodel.params import BYTES, bytes_per_value

PRODUCTS, EXPERTS = "matrix products", "routed experts"
DECODE, PREFILL = "attention, decode", "attention, prefill"
SMALL, SAMPLING = "norm, gate, rotate, round", "sampling"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What this device was seen to do. bytes/s, FLOP/s."""

    read: float
    products: float  # of the blocks' matrix products, in the format of the run and with as many tokens as a step has
    head: float  # of the head's product, in bf16
    bf16: float  # the best of bf16: for attention, routers and what latent attention absorbs


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step computes; where it is an average, a part of a prompt counts as that part."""

    decodes: float = 0.0  # tokens generated from one token each
    context: float = 0.0  # cached tokens that each of these attends to, itself included
    prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0  # (query, key) pairs of these
    samples: float = 0.0  # rows that go through the head
    experts: float | None = None  # that some token visits, in each layer; none: as many as equal odds let expect

    @property
    def tokens(self) -> float:
        return self.decodes + self.prompt_tokens


@dataclass(frozen=True)
class Term:
    """What one kind of kernel must at least move and compute in a step, over all layers."""

    name: str
    kind: str  # the class of kernels it belongs to
    bytes: float
    flops: float
    rate: Literal["products", "head", "bf16"]

    def seconds(self, rates: Rates) -> float:
        return max(self.bytes / rates.read, self.flops / getattr(rates, self.rate))


def steady_step(isl: int, osl: int, batch: float) -> Step:
    """The average step while `batch` requests go on at once: each gives a token.

    A request is one prompt and osl - 1 generated tokens; of the steps it takes, one in osl ends a prompt. The token
    after k others attends to isl + k, on average to isl + osl / 2.
    """
    return Step(
        decodes=batch * (osl - 1) / osl,
        context=isl + osl / 2,
        prompt_tokens=batch * isl / osl,
        prompt_pairs=batch / osl * isl * isl / 2,
        samples=batch,
    )


def decode_step(batch: int, context: float, experts: float | None = None) -> Step:
    """Every request generates."""
    return Step(decodes=batch, context=context, samples=batch, experts=experts)


def prompt_step(tokens: int) -> Step:
    """One prompt, all of it."""
    return Step(prompt_tokens=tokens, prompt_pairs=tokens * tokens / 2, samples=1)


def terms(model: Model, precision: Precision, step: Step) -> list[Term]:
    """All that a step must do."""
    found = []
    for kind, count, block in block_stack(model):
        found += _block_terms(model, precision, step, kind, count, block)
    head = model.hidden * model.vocab
    return [*found, Term("head", PRODUCTS, BYTES["bf16"] * head, 2 * step.samples * head, "head")]


def _block_terms(model: Model, precision: Precision, step: Step, kind: str, count: int, block: BlockCost) -> list[Term]:
    tokens, each = step.tokens, bytes_per_value(precision.dtype)
    plain = _kept_plain(model, kind)
    matrices = count * (block.dense_weights - plain)
    found = [Term(f"{kind} weights", PRODUCTS, each * matrices, 2 * tokens * matrices, "products")]
    if plain:
        found.append(Term("kv_up", PRODUCTS, BYTES["bf16"] * count * plain, 2 * tokens * count * plain, "bf16"))
    if block.decode_pair_macs:
        cached = step.decodes * step.context * count
        found.append(
            Term("cache", DECODE, cached * cached_bytes(model, precision), 2 * cached * block.decode_pair_macs, "bf16")
        )
        found.append(Term("prompts", PREFILL, 0.0, 2 * step.prompt_pairs * count * block.pair_macs, "bf16"))
    if block.routed_weights:
        found += _expert_terms(model, step, count, block, each)
    return found


def _expert_terms(model: Model, step: Step, count: int, block: BlockCost, each: float) -> list[Term]:
    assert model.experts is not None
    experts = model.experts
    visited = distinct_experts(experts.count, experts.top_k, step.tokens) if step.experts is None else step.experts
    read = each * count * visited * block.routed_weights / experts.count
    router = count * model.hidden * experts.count
    return [
        Term("experts", EXPERTS, read, 2 * step.tokens * count * block.active_routed_weights, "products"),
        Term("router", PRODUCTS, BYTES["bf16"] * router, 2 * step.tokens * router, "bf16"),
    ]


def distinct_experts(count: int, top_k: int, tokens: float) -> float:
    """How many experts of a layer are visited, on average, if all are equally likely."""
    return count * (1 - (1 - top_k / count) ** tokens)


def on_one_of(gpus: int, model: Model, step: Step) -> Step:
    """A GPU's own step where each has its own requests (attention data parallelism) and a share of the experts.

    Its experts see the tokens of all, and are visited as often as its own tokens visit any.
    """
    assert model.experts is not None
    everybodys = distinct_experts(model.experts.count, model.experts.top_k, gpus * step.tokens)
    return replace(step, experts=everybodys / gpus)


def exchange_seconds(gpus: int, model: Model, tokens: float, link: float) -> float:
    """What these layouts add at `link` bytes/s each way: around each layer of experts every GPU receives the tokens of
    all others and sends its sums back to them, in bf16. Latency and waiting for one another are left out."""
    one_way = (gpus - 1) * tokens * model.hidden * BYTES["bf16"] / link
    return 2 * model.blocks["experts"] * one_way


def _kept_plain(model: Model, kind: str) -> int:
    """Weights of a block that stay in bf16 whatever the format: what latent attention absorbs (kv_up)."""
    if kind != "mla" or model.mla is None:
        return 0
    return model.mla.kv_rank * model.heads * (model.mla.nope_dim + model.mla.value_dim)


def cached_bytes(model: Model, precision: Precision) -> float:
    """Of one token in one attention block; latents may be in fp8, their rotated keys stay in bf16."""
    each = bytes_per_value(precision.kv_dtype or "bf16")
    if model.mla is not None:
        return model.mla.kv_rank * each + model.mla.rope_dim * BYTES["bf16"]
    return 2 * model.kv_heads * model.head_dim * each


def ceiling(found: list[Term], rates: Rates) -> float:
    """Seconds of a step that does nothing else."""
    return sum(term.seconds(rates) for term in found)


def by_kind(found: list[Term], rates: Rates) -> dict[str, float]:
    """The same for each class of kernels."""
    kinds: dict[str, float] = {}
    for term in found:
        kinds[term.kind] = kinds.get(term.kind, 0.0) + term.seconds(rates)
    return kinds


def small_bytes(model: Model, precision: Precision) -> float | None:
    """Activations that norms, rotation, rounding and gates read and write for a token; none for latents and experts.

    No part of the ceiling: a fused kernel could leave some of it out. A layer with q, k, v in one product: two
    additions with norm (two inputs, the sum and the normed copy each), rotation (q, k, v in; q and the cache out),
    rounding of the mixed values, the gate (gate and up in, one width out).
    """
    if model.mla is not None or model.experts is not None or model.pattern is not None:
        return None
    wide, rounded = BYTES["bf16"], bytes_per_value(precision.dtype)
    width, kv_width = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    norms = 2 * model.hidden * (3 * wide + rounded)
    rotation = wide * (2 * width + kv_width) + cached_bytes(model, precision)
    rounding = width * (wide + rounded) if rounded != wide else 0
    return model.layers * (norms + rotation + rounding + model.ffn * (2 * wide + rounded))


def product_shapes(model: Model) -> list[tuple[int, int]]:
    """(outputs, inputs) of one dense layer's products, as the engine joins them."""
    hidden, latent = model.hidden, model.mla
    mlp = [(2 * model.ffn, hidden), (hidden, model.ffn)]
    if latent is None:
        width = model.heads * model.head_dim
        return [(width + 2 * model.kv_heads * model.head_dim, hidden), (hidden, width), *mlp]
    down = latent.q_rank + latent.kv_rank + latent.rope_dim
    query = model.heads * (latent.nope_dim + latent.rope_dim)
    return [(down, hidden), (query, latent.q_rank), (hidden, model.heads * latent.value_dim), *mlp]
