"""Lower bound of a serving step: for each class of kernels its bytes over the bandwidth or its FLOPs over the rate,
whichever takes longer; classes run one after the other, so their times add up.

    sum(term.seconds(rates) for term in terms(model, precision, steady_step(isl=1000, osl=1000, batch=960)))

Bytes and FLOPs follow from `llmb.perfmodel.flops`, bandwidth and rates are measured with the engine (`infer_rates.py`).
Only what must be moved counts: weights and cached tokens once a step, no activations. Attention, MLP and MoE; no Mamba.
"""

from dataclasses import dataclass, replace
from typing import Literal

from llmb.config.model import Model
from llmb.config.spec import Precision
from llmb.perfmodel.block_costs import BlockCost, attended_tokens, block_stack, layer_window
from llmb.perfmodel.params import BYTES, bytes_per_value, dense_bytes_per_value

PRODUCTS, EXPERTS = "GEMM", "routed experts"
DECODE, PREFILL = "attention, decode", "attention, prefill"
SMALL, SAMPLING = "norm, activation, RoPE, quantization", "sampling"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of this device, in bytes/s and FLOP/s."""

    read: float
    products: float  # of the blocks' GEMMs, in the dtype and with the tokens of a step
    head: float  # of the head's GEMM, in bf16
    bf16: float  # the best of bf16: for attention, routers and absorbed MLA weights


@dataclass(frozen=True, kw_only=True)
class Step:
    """Work of a step; of an average step, fractions of prompts count."""

    decodes: float = 0.0  # tokens generated from one token each
    context: float = 0.0  # cached tokens that each of these attends to, itself included
    prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0  # (query, key) pairs of these
    samples: float = 0.0  # rows that go through the head
    experts: float | None = None  # active in each layer; none: as many as uniform routing is expected to activate

    @property
    def tokens(self) -> float:
        return self.decodes + self.prompt_tokens


@dataclass(frozen=True)
class Term:
    """Bytes and FLOPs that one kind of kernel needs in a step, over all layers."""

    name: str
    kind: str  # class of kernels
    bytes: float
    flops: float
    rate: Literal["products", "head", "bf16"]

    def seconds(self, rates: Rates) -> float:
        return max(self.bytes / rates.read, self.flops / getattr(rates, self.rate))


def steady_step(isl: int, osl: int, batch: float) -> Step:
    """Return the average step with `batch` concurrent requests: each gives a token.

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
    """Return a step in which every request decodes."""
    return Step(decodes=batch, context=context, samples=batch, experts=experts)


def prompt_step(tokens: int) -> Step:
    """Return a step with one whole prompt."""
    return Step(prompt_tokens=tokens, prompt_pairs=tokens * tokens / 2, samples=1)


def terms(model: Model, precision: Precision, step: Step) -> list[Term]:
    """Return the terms of a step."""
    terms_of_step = []
    for kind, count, block in block_stack(model):
        terms_of_step += _block_terms(model, precision, step, kind, count, block)
    head = model.hidden * model.vocab
    return [*terms_of_step, Term("head", PRODUCTS, BYTES["bf16"] * head, 2 * step.samples * head, "head")]


def _block_terms(model: Model, precision: Precision, step: Step, kind: str, count: int, block: BlockCost) -> list[Term]:
    tokens, value_bytes = step.tokens, dense_bytes_per_value(precision.dtype)
    plain = _kept_plain(model, kind)
    matrices = count * (block.dense_weights - plain)
    terms_of_step = [Term(f"{kind} weights", PRODUCTS, value_bytes * matrices, 2 * tokens * matrices, "products")]
    if plain:
        terms_of_step.append(Term("kv_up", PRODUCTS, BYTES["bf16"] * count * plain, 2 * tokens * count * plain, "bf16"))
    if block.decode_pair_macs:
        cached = step.decodes * attended_tokens(model, step.context) * count
        terms_of_step.append(
            Term("cache", DECODE, cached * cached_bytes(model, precision), 2 * cached * block.decode_pair_macs, "bf16")
        )
        rate: Literal["products", "bf16"] = "bf16" if precision.attention_dtype is None else "products"
        terms_of_step.append(
            Term("prompts", PREFILL, 0.0, 2 * _seen_pairs(model, step) * count * block.pair_macs, rate)
        )
    if block.routed_weights:
        terms_of_step += _expert_terms(model, step, count, block, bytes_per_value(precision.dtype))
    return terms_of_step


def _expert_terms(model: Model, step: Step, count: int, block: BlockCost, value_bytes: float) -> list[Term]:
    assert model.experts is not None
    experts = model.experts
    active = distinct_experts(experts.count, experts.top_k, step.tokens) if step.experts is None else step.experts
    read = value_bytes * count * active * block.routed_weights / experts.count
    router = count * model.hidden * experts.count
    return [
        Term("experts", EXPERTS, read, 2 * step.tokens * count * block.active_routed_weights, "products"),
        Term("router", PRODUCTS, BYTES["bf16"] * router, 2 * step.tokens * router, "bf16"),
    ]


def _seen_pairs(model: Model, step: Step) -> float:
    """Return the (query, key) pairs of the prompts, on average over layers; prompts are of equal length."""
    if not step.prompt_tokens:
        return 0.0
    isl = 2 * step.prompt_pairs / step.prompt_tokens
    windows = (min(isl, layer_window(model, layer) or isl) for layer in range(model.layers))
    return step.prompt_tokens * sum(seen - seen * seen / (2 * isl) for seen in windows) / model.layers


def distinct_experts(count: int, top_k: int, tokens: float) -> float:
    """Return the expected number of active experts of a layer under uniform routing."""
    return count * (1 - (1 - top_k / count) ** tokens)


def step_of_one_gpu(gpus: int, model: Model, step: Step) -> Step:
    """Return the step of one GPU under attention data parallelism and expert parallelism.

    Its experts receive tokens of all GPUs, as many pairs as its own tokens route anywhere.
    """
    assert model.experts is not None
    everybodys = distinct_experts(model.experts.count, model.experts.top_k, gpus * step.tokens)
    return replace(step, experts=everybodys / gpus)


def collective_seconds(gpus: int, model: Model, tokens: float, link: float) -> float:
    """Return the seconds of collectives at `link` bytes/s each way: around each MoE layer every GPU gathers the tokens
    of all GPUs and reduces its sums to them, in bf16. Latency and waiting are left out."""
    one_way = (gpus - 1) * tokens * model.hidden * BYTES["bf16"] / link
    return 2 * model.blocks["experts"] * one_way


def _kept_plain(model: Model, kind: str) -> int:
    """Return the weights of a block that stay in bf16: those that MLA absorbs (kv_up)."""
    if kind != "mla" or model.mla is None:
        return 0
    return model.mla.kv_rank * model.heads * (model.mla.nope_dim + model.mla.value_dim)


def cached_bytes(model: Model, precision: Precision) -> float:
    """Return the cached bytes of a token in one attention block; MLA latents may be in fp8, RoPE keys stay in bf16."""
    value_bytes = bytes_per_value(precision.kv_dtype or "bf16")
    if model.mla is not None:
        return model.mla.kv_rank * value_bytes + model.mla.rope_dim * BYTES["bf16"]
    return 2 * model.kv_heads * model.head_dim * value_bytes


def ceiling(terms_of_step: list[Term], rates: Rates) -> float:
    """Return the lower bound of a step in seconds."""
    return sum(term.seconds(rates) for term in terms_of_step)


def by_kind(terms_of_step: list[Term], rates: Rates) -> dict[str, float]:
    """Return the lower bound of each class of kernels."""
    kinds: dict[str, float] = {}
    for term in terms_of_step:
        kinds[term.kind] = kinds.get(term.kind, 0.0) + term.seconds(rates)
    return kinds


def small_bytes(model: Model, precision: Precision) -> float | None:
    """Return the bytes that norms, RoPE, quantization and gates move for a token; None for MLA and MoE.

    Not part of the ceiling: fused kernels could save some of it. A layer with q, k, v in one GEMM: two additions with
    norm (two inputs, the sum and the normed copy each), RoPE (q, k, v in; q and the cache out), quantization of the
    attention output, the gate (gate and up in, one width out).
    """
    if model.mla is not None or model.experts is not None or model.pattern is not None:
        return None
    bf16_bytes, rounded = BYTES["bf16"], bytes_per_value(precision.dtype)
    width, kv_width = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    norms = 2 * model.hidden * (3 * bf16_bytes + rounded)
    rope = bf16_bytes * (2 * width + kv_width) + cached_bytes(model, precision)
    rounding = width * (bf16_bytes + rounded) if rounded != bf16_bytes else 0
    return model.layers * (norms + rope + rounding + model.ffn * (2 * bf16_bytes + rounded))


def product_shapes(model: Model) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the GEMMs of one dense layer, or of one expert, fused as in the engine."""
    hidden, mla = model.hidden, model.mla
    ffn = model.ffn if model.experts is None or model.experts.dense_layers else model.experts.ffn
    mlp = [(2 * ffn, hidden), (hidden, ffn)]
    if mla is None:
        width = model.heads * model.head_dim
        return [(width + 2 * model.kv_heads * model.head_dim, hidden), (hidden, width), *mlp]
    down = mla.q_rank + mla.kv_rank + mla.rope_dim
    query = model.heads * (mla.nope_dim + mla.rope_dim)
    return [(down, hidden), (query, mla.q_rank), (hidden, model.heads * mla.value_dim), *mlp]
