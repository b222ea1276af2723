"""Explicit Llama layers, one autograd node each, on one rank and on several, compute what the plain layers do."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
import torch.distributed as dist
from explicit_layers import (
    LayersResult,
    explicit_part,
    forward_backward,
    full_result,
    plain_network,
    run_layers,
    worst_error,
)
from forked_ranks import on_ranks
from sharded_network import FP32, ONE
from small_config import CONFIG
from small_models import llama_model
from torch import Tensor, nn

from llmb.config.model import Model
from llmb.config.spec import Parallel
from llmb.models.llama_layer.layer_recipes import LAYER_RECIPES
from llmb.models.llama_layer.linear_gemms import Fp8LinearGemms, LinearGemms, ScaledLinearGemms
from llmb.ops.gemm.matmul import matmul
from llmb.ops.quant.vector_scaling import VECTOR_SCALINGS
from llmb.train.llama_layers import (
    begin_step,
    explicit_layers,
    init_fp8_scaling,
    quantize_weights,
    use_explicit_layers,
)
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import Mesh, build_mesh

CPU = torch.device("cpu")
MODEL = llama_model(name="small", hidden=64, ffn=96, vocab=128)  # shards of ffn, 48 channels, are fp8's too
VARIANTS: dict[str, dict[str, object]] = {
    "windows, no RoPE": {"attention_pattern": "SN", "window": 5, "attention_scale": 0.2},
    "biases": {"qkv_bias": True},
    "norms of heads": {"qk_norm": "head"},
    "post-norms, GeGLU, softcap": {"post_norms": True, "activation": "gelu", "attn_logit_softcap": 4.0},
}
BLOCKS = llama_model(name="blocks", hidden=128, ffn=256, heads=4, kv_heads=4, head_dim=64, vocab=128)
BIASED = replace(MODEL, name="biased", qkv_bias=True, qk_norm="head")
GEMMA_2 = replace(MODEL, name="gemma2", attention_pattern="SF", window=5, **VARIANTS["post-norms, GeGLU, softcap"])
TOKENS = 24  # a shard of 24 / 2 / 2 tokens is not a multiple of 16, which fp8 pads to
SAVED = ({}, {"recompute_layers": 2}, {"save_norm_outputs": True})  # what is saved for the backward pass
LAYOUTS = {"tp2": Parallel(tp=2), "cp2": Parallel(cp=2), "tp2 cp2": Parallel(tp=2, cp=2)}
FOUR_RANKS = "tp2 cp2"  # whose collectives take long: fp32 of one test by day, all else at night
# Largest relative error of an output or gradient against the plain layers in fp32, and of ranks against one rank. Sums
# over ranks are rounded to bf16, and where that moves a value across a boundary of fp8, by 6 or 12 %.
BOUNDS = {"fp32": (1e-5, 1e-5), "bf16": (0.03, 0.02), "fp8": (0.3, 0.25)}


def inputs(dtype: str, sequences: int, hidden: int = MODEL.hidden, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Return residual and gradient of full sequences."""
    generator = torch.Generator().manual_seed(3)
    tensors = (torch.randn(sequences, tokens, hidden, generator=generator) for _ in range(2))
    x_BTC, dy_BTC = (tensor if dtype == "fp32" else tensor.bfloat16() for tensor in tensors)
    return x_BTC, dy_BTC


def explicit_result(
    dtype: str, sequences: int, model: Model = MODEL, mesh: Mesh = ONE, tokens: int = TOKENS, **settings: object
) -> LayersResult:
    """Return what a rank computes, by default the only one."""
    part = explicit_part(model, dtype, mesh, mbs=sequences, **settings)
    is_exact = settings.get("formats") is FP32
    return run_layers(part, *inputs("fp32" if is_exact else dtype, sequences, model.hidden, tokens), mesh)


def plain_result(dtype: str, sequences: int, model: Model = MODEL) -> LayersResult:
    """Return what plain layers compute by autograd in fp32, from the inputs of a dtype."""
    network, (x_BTC, dy_BTC) = plain_network(model), inputs(dtype, sequences, model.hidden)
    out_BTC, dx_BTC = forward_backward(network, x_BTC.float(), dy_BTC.float())
    named = network.named_parameters()
    return LayersResult(out_BTC, dx_BTC, [(name, (), p.grad) for name, p in named if p.grad is not None])


@pytest.mark.parametrize("saved", SAVED[:2], ids=str)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_variants_of_layers_match_plain_layers(fields: dict[str, object], saved: dict[str, object]) -> None:
    model = replace(MODEL, **fields)
    actual = explicit_result("fp32", 2, model, formats=FP32, **saved)
    assert worst_error(actual, plain_result("fp32", 2, model)) < BOUNDS["fp32"][0]


@pytest.mark.parametrize("settings", SAVED, ids=["saved", "recomputed", "norm outputs saved"])
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_one_rank_equals_plain_layers(dtype: str, sequences: int, settings: dict) -> None:
    error = worst_error(explicit_result(dtype, sequences, **settings), plain_result(dtype, sequences))
    assert error < BOUNDS[dtype][0]
    assert dtype != "fp8" or error > 0.03  # it is quantized


def rank_results(
    rank: int, model: Model, parallel: Parallel, dtype: str, cases: list[tuple[int, dict]]
) -> list[LayersResult]:
    """Return the results of all cases on a rank."""
    dist.init_process_group("gloo")
    mesh = build_mesh(rank, CPU, parallel, experts=False)
    return [explicit_result(dtype, sequences, model, mesh, **settings) for sequences, settings in cases]


def ranks_and_one(
    parallel: Parallel, dtype: str, model: Model = MODEL, **changes: object
) -> Iterator[tuple[int, LayersResult, LayersResult]]:
    """Yield the number of sequences and the results of all ranks and of one, for all that may be saved."""
    cases = [(sequences, settings | changes) for sequences in (1, 2) for settings in SAVED]
    by_rank = on_ranks(parallel.world_size, rank_results, model, parallel, dtype, cases)
    for (sequences, settings), *ranks in zip(cases, *by_rank, strict=True):
        yield sequences, full_result(model, ranks, parallel), explicit_result(dtype, sequences, model, **settings)


@pytest.mark.parametrize(
    ("parallel", "dtype"),
    [
        pytest.param(
            parallel,
            dtype,
            id=f"{name}-{dtype}",
            marks=[pytest.mark.nightly] if name == FOUR_RANKS and dtype != "fp32" else [],
        )
        for name, parallel in LAYOUTS.items()
        for dtype in BOUNDS
    ],
)
def test_ranks_equal_one_rank(parallel: Parallel, dtype: str) -> None:
    for sequences, result, expected in ranks_and_one(parallel, dtype):
        assert worst_error(result, expected) < BOUNDS[dtype][1]
        exact = plain_result(dtype, sequences)
        assert worst_error(result, exact) < 1.1 * worst_error(expected, exact) + BOUNDS["fp32"][0]


def test_fp8_layers_read_the_current_bias() -> None:
    """Quantized matrices stay for a step, the bias beside them is no view of its parameters."""
    part, (x_BTC, dy_BTC) = explicit_part(BIASED, "fp8", ONE, mbs=1), inputs("fp8", 1)
    before, _ = forward_backward(part, x_BTC, dy_BTC)
    with torch.no_grad():
        part.layers[0].attention.v_bias += 1
    after, _ = forward_backward(part, x_BTC, dy_BTC)
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [(BIASED, "tp2", "fp8"), (GEMMA_2, "tp2", "fp32"), (GEMMA_2, "cp2", "fp32"),
     pytest.param(BIASED, "tp2", "fp32", marks=pytest.mark.nightly),
     pytest.param(GEMMA_2, "tp2", "fp8", marks=pytest.mark.nightly)],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_ranks_of_other_layers_equal_one_rank(model: Model, layout: str, dtype: str) -> None:
    for _, result, expected in ranks_and_one(LAYOUTS[layout], dtype, model):
        assert worst_error(result, expected) < BOUNDS[dtype][1]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(parallel, id=name, marks=[pytest.mark.nightly] if name != "tp2" else [])
        for name, parallel in LAYOUTS.items()
    ],
)
def test_ranks_in_fp8_equal_one_rank_with_a_residual_in_fp32(parallel: Parallel) -> None:
    """So all operands are the same, but for a few that rounding errors move across a boundary of fp8."""
    for _, result, expected in ranks_and_one(parallel, "fp8", formats=FP32):
        assert worst_error(result, expected) < 0.01


@pytest.mark.parametrize("recompute_layers", [0, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("model", [MODEL, GEMMA_2], ids=lambda model: model.name)
def test_saved_norm_outputs_equal_recomputed_ones(model: Model, dtype: str, recompute_layers: int) -> None:
    parts = [
        explicit_part(model, dtype, ONE, recompute_layers=recompute_layers, save_norm_outputs=saved)
        for saved in (False, True)
    ]
    for _step in range(2):  # the second step has scales from the first
        results = [run_layers(part, *inputs(dtype, 2), ONE) for part in parts]
        assert worst_error(*results) == 0
        for part in parts:
            begin_step(part)


def test_gradients_are_written_into_their_bucket() -> None:
    part = explicit_part(MODEL, "bf16", ONE)
    for _ in range(2):
        forward_backward(part, *inputs("bf16", 2))
        for weight in (weight for weight in part.layers.parameters() if weight.ndim > 1):
            assert weight.grad.data_ptr() == weight.bucket.grad_view(weight.number).data_ptr()


@pytest.mark.parametrize("model", [MODEL, BIASED, GEMMA_2], ids=lambda model: model.name)
def test_gradients_of_norms_accumulate_in_place(model: Model) -> None:
    part, (x_BTC, dy_BTC) = explicit_part(model, "bf16", ONE), inputs("bf16", 2)

    def gradients(*batches: Tensor) -> dict[str, Tensor]:
        sharded_parameters(part).zero_grad()
        for batch_BTC in batches:
            forward_backward(part, batch_BTC.clone(), dy_BTC)
        return {name: weight.grad for name, weight in part.layers.named_parameters() if weight.ndim == 1}

    first, second, both = gradients(x_BTC), gradients(-2 * x_BTC), gradients(x_BTC, -2 * x_BTC)
    assert all(torch.equal(grad, first[name] + second[name]) for name, grad in both.items())
    written, accumulate = explicit_layers(part)[0].gradients()
    assert accumulate
    assert written.norm1_C is both["0.attention_norm.weight"]
    assert written.norm2_C is both["0.mlp_norm.weight"]


@pytest.mark.parametrize("recipe", LAYER_RECIPES)
@pytest.mark.parametrize("recompute_layers", [0, 2])
def test_fp8_weights_of_a_pass_equal_those_of_a_step(recipe: str, recompute_layers: int) -> None:
    settings = {"fp8_recipe": recipe, "recompute_layers": recompute_layers}
    results = (explicit_result("fp8", 2, BLOCKS, weights_stay=stay, **settings) for stay in (True, False))
    assert worst_error(*results) == 0


@pytest.mark.parametrize("settings", SAVED, ids=["saved", "recomputed", "norm outputs saved"])
@pytest.mark.parametrize("recipe", VECTOR_SCALINGS)
def test_recipes_with_many_scales_are_as_close_to_plain_layers_as_one_scale(recipe: str, settings: dict) -> None:
    exact = plain_result("fp8", 2, BLOCKS)
    one_scale, many = (
        worst_error(explicit_result("fp8", 2, BLOCKS, fp8_recipe=name, **settings), exact)
        for name in ("tensorwise_delayed", recipe)
    )
    assert 0.1 < many < one_scale < 0.4  # wide layers of large weights: 0.03 in bf16


@pytest.mark.parametrize(
    ("recipe", "model", "layout", "tokens"),
    [
        ("rowwise", MODEL, "cp2", TOKENS),
        *(pytest.param("rowwise", MODEL, layout, TOKENS, marks=pytest.mark.nightly) for layout in ("tp2", FOUR_RANKS)),
        ("blockwise", BLOCKS, "tp2", TOKENS),
        # Chunks of whole groups; with groups that ranks divide the error is 0.04. Two layers would amplify rounding.
        pytest.param("blockwise", replace(BLOCKS, layers=1), "cp2", 512, marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_ranks_of_recipes_with_many_scales_equal_one_rank(recipe: str, model: Model, layout: str, tokens: int) -> None:
    """With a residual in fp32 all operands are the same, but for a few that rounding moves across a boundary of fp8."""
    changes = {"formats": FP32, "fp8_recipe": recipe, "tokens": tokens}
    for _, result, expected in ranks_and_one(LAYOUTS[layout], "fp8", model, **changes):
        assert worst_error(result, expected) < 0.01


def test_fp8_weights_are_refreshed_by_begin_step() -> None:
    part = explicit_part(MODEL, "fp8", ONE)
    (layer, _), weight = explicit_layers(part), part.layers[0].mlp.down.weight
    quantize_weights(part)
    before = layer.fp8_weights.rows("w2").rows.float()
    with torch.no_grad():
        weight.mul_(-0.9)
    quantize_weights(part)
    assert torch.equal(layer.fp8_weights.rows("w2").rows.float(), before)
    begin_step(part)
    quantize_weights(part)
    quantized = layer.fp8_weights.columns("w2")
    error = (quantized.columns.T.float() * quantized.scale) - weight.detach().float()
    assert error.norm() < 0.05 * weight.norm()


def test_names_of_scales_are_those_of_the_whole_model() -> None:
    stage = plain_network(MODEL)
    (_, last), stage.layers = stage.layers, nn.ModuleList()
    stage.layers.add_module("1", last)  # as a pipeline stage has it
    use_explicit_layers(stage, "fp8", CONFIG.workload)
    init_fp8_scaling(stage, CPU)
    assert stage.fp8_scaling is not None
    assert {name.rpartition(".")[0] for name in stage.fp8_scaling.state_dict()} == {"layers.1"}


def test_widths_that_fp8_does_not_take_are_computed_in_bf16() -> None:
    narrow = replace(MODEL, ffn=72)
    assert worst_error(*(explicit_result(dtype, 2, narrow) for dtype in ("bf16", "fp8"))) == 0


@pytest.mark.parametrize("fp8_fast_accum", [False, True])
def test_fast_accumulation_of_backward_gemms(monkeypatch, fp8_fast_accum: bool) -> None:
    counts = Counter[bool]()

    def count_matmul(*operands: Tensor, fast: bool = False, **kwargs: object) -> Tensor:
        counts[fast] += "scales" in kwargs
        return matmul(*operands, fast=fast, **kwargs)

    monkeypatch.setattr("llmb.models.llama_layer.linear_gemms.matmul", count_matmul)
    explicit_result("fp8", 2, fp8_fast_accum=fp8_fast_accum)
    # Two layers of seven matrices; q, k and v are merged, and gate and up.
    forward, back = 2 * 4, 2 * 2 * 4
    assert counts[True] == forward + fp8_fast_accum * back
    assert counts[False] == (not fp8_fast_accum) * back


@pytest.mark.parametrize(
    ("model", "settings", "widths"),
    [
        (BLOCKS, {}, [3 * 256, 128, 512, 128]),
        (BLOCKS, {"recompute_layers": 1}, [256, 256, 256, 128, 512, 128, 256, 128, 512]),
        (replace(BLOCKS, qk_norm="head"), {}, [256, 256, 256, 128, 512, 128]),
    ],
    ids=["saved", "recomputed", "norms of heads"],
)
@pytest.mark.parametrize("recipe", [None, *LAYER_RECIPES])
def test_queries_keys_and_values_that_are_saved_take_one_gemm(
    monkeypatch, recipe: str | None, model: Model, settings: dict, widths: list[int]
) -> None:
    outputs: list[int] = []

    def recorded(self: object, forward: Callable[..., Tensor], *operands: object, **addend: Tensor) -> Tensor:
        out = forward(self, *operands, **addend)
        outputs.append(out.shape[1])
        return out

    for gemms in (LinearGemms, Fp8LinearGemms, ScaledLinearGemms):
        monkeypatch.setattr(gemms, "forward", partialmethod(recorded, gemms.forward))
    fp8 = {} if recipe is None else {"fp8_recipe": recipe}
    explicit_result("fp8" if fp8 else "bf16", 2, replace(model, layers=1), **settings, **fp8)
    assert outputs == widths


@pytest.mark.parametrize("settings", SAVED, ids=["saved", "recomputed", "norm outputs saved"])
@pytest.mark.parametrize("fields", [{}, *VARIANTS.values()], ids=["plain", *VARIANTS])
def test_saved_tensors_are_whole_and_saved_once(fields: dict[str, object], settings: dict[str, object]) -> None:
    """Activation offload copies each: of three views of one matrix it would make three copies without gaps."""
    storages: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        assert tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        storages.append(tensor.untyped_storage()._cdata)
        return tensor

    part = explicit_part(replace(MODEL, layers=1, **fields), "bf16", ONE, mbs=1, **settings)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward_backward(part, *inputs("bf16", 1))
    assert len(set(storages)) == len(storages) > 5
