"""Explicit Llama layers, one autograd node each, on one rank and on several, compute what the plain layers do."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from explicit_layers import LayersResult, explicit_part, full_result, plain_network, run_layers
from forked_ranks import on_ranks
from small_config import CONFIG, changed
from small_models import llama_model
from torch import Tensor, nn

from llmb.config.spec import Model, Parallel, RunConfig
from llmb.models.architectures import Network
from llmb.ops.gemm.matmul import matmul
from llmb.ops.quant.delayed_scaling import CurrentScaling, DelayedScaling
from llmb.train.llama_layers import begin_step, explicit_layers, quantize_weights
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import Mesh, build_mesh
from llmb.train.parallelize import build_model_parts, build_optimizer
from llmb.train.train_checkpoint import Checkpointer

CPU = torch.device("cpu")
ONE = Mesh(0, 1, CPU)
MODEL = llama_model(name="small", hidden=64, ffn=96, vocab=128)  # shards of ffn, 48 channels, are fp8's too
TOKENS = 24  # a shard of 24 / 2 / 2 tokens is not a multiple of 16, which fp8 pads to
SAVED = ({}, {"recomputed": True}, {"save_norm_outputs": True})  # what is saved for the backward pass
LAYOUTS = {"tp2": Parallel(tp=2), "cp2": Parallel(cp=2), "tp2 cp2": Parallel(tp=2, cp=2)}
# Largest relative error of an output or gradient against the plain layers in fp32, and of ranks against one rank. Sums
# over ranks are rounded to bf16, and where that moves a value across a boundary of fp8, by 6 or 12 %.
BOUNDS = {"fp32": (1e-5, 1e-5), "bf16": (0.03, 0.02), "fp8": (0.3, 0.25)}


def inputs(dtype: str, sequences: int) -> tuple[Tensor, Tensor]:
    """Return residual and gradient of full sequences."""
    generator = torch.Generator().manual_seed(3)
    tensors = (torch.randn(sequences, TOKENS, MODEL.hidden, generator=generator) for _ in range(2))
    x_BTC, dy_BTC = (tensor if dtype == "fp32" else tensor.bfloat16() for tensor in tensors)
    return x_BTC, dy_BTC


def explicit_result(dtype: str, mesh: Mesh, sequences: int, model: Model = MODEL, **settings: object) -> LayersResult:
    part = explicit_part(plain_network(model), dtype, mesh, mbs=sequences, **settings)
    exact = settings.get("weights") is torch.float32
    return run_layers(part, *inputs("fp32" if exact else dtype, sequences), mesh)


def plain_result(dtype: str, sequences: int) -> LayersResult:
    """Return what plain layers compute by autograd in fp32, from the inputs of a dtype."""
    x_BTC, dy_BTC = inputs(dtype, sequences)
    return run_layers(plain_network(MODEL), x_BTC.float(), dy_BTC.float(), ONE)


def worst(result: LayersResult, expected: LayersResult) -> float:
    return max(result.errors(expected).values())


@pytest.mark.parametrize("settings", SAVED, ids=["saved", "recomputed", "norm outputs saved"])
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_one_rank_equals_plain_layers(dtype: str, sequences: int, settings: dict) -> None:
    result = explicit_result(dtype, ONE, sequences, **settings)
    assert worst(result, plain_result(dtype, sequences)) < BOUNDS[dtype][0]
    assert dtype != "fp8" or worst(result, plain_result(dtype, sequences)) > 0.03  # it is quantized


def rank_results(rank: int, parallel: Parallel, dtype: str, cases: list[tuple[int, dict]]) -> list[LayersResult]:
    """Return the results of all cases on a rank."""
    dist.init_process_group("gloo")
    mesh = build_mesh(rank, CPU, parallel, experts=False)
    return [explicit_result(dtype, mesh, sequences, **settings) for sequences, settings in cases]


def ranks_and_one(
    parallel: Parallel, dtype: str, **changes: object
) -> Iterator[tuple[int, LayersResult, LayersResult]]:
    """Yield the number of sequences and the results of all ranks and of one, for all that may be saved."""
    cases = [(sequences, settings | changes) for sequences in (1, 2) for settings in SAVED]
    by_rank = on_ranks(parallel.world_size, rank_results, parallel, dtype, cases)
    for (sequences, settings), *ranks in zip(cases, *by_rank, strict=True):
        yield sequences, full_result(ranks, parallel), explicit_result(dtype, ONE, sequences, **settings)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_equal_one_rank(parallel: Parallel, dtype: str) -> None:
    for sequences, result, expected in ranks_and_one(parallel, dtype):
        assert worst(result, expected) < BOUNDS[dtype][1]
        exact = plain_result(dtype, sequences)
        assert worst(result, exact) < 1.1 * worst(expected, exact) + BOUNDS["fp32"][0]


@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_in_fp8_equal_one_rank_with_a_residual_in_fp32(parallel: Parallel) -> None:
    """So all operands are the same, but for a few that rounding errors move across a boundary of fp8."""
    for _, result, expected in ranks_and_one(parallel, "fp8", weights=torch.float32):
        assert worst(result, expected) < 0.01


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_saved_norm_outputs_equal_recomputed_ones(dtype: str, recomputed: bool) -> None:
    parts = [
        explicit_part(plain_network(MODEL), dtype, ONE, recomputed=recomputed, save_norm_outputs=saved)
        for saved in (False, True)
    ]
    for _step in range(2):  # the second step has scales from the first
        results = [run_layers(part, *inputs(dtype, 2), ONE) for part in parts]
        assert worst(*results) == 0
        for part in parts:
            begin_step(part)


def test_gradients_accumulate() -> None:
    once, twice = (explicit_part(plain_network(MODEL), "fp32", ONE) for _ in range(2))
    single = run_layers(once, *inputs("fp32", 2), ONE)
    for _ in range(2):
        double = run_layers(twice, *inputs("fp32", 2), ONE)
    for name, grad in single.grads.items():
        torch.testing.assert_close(double.grads[name], 2 * grad)


def test_gradients_are_contiguous_and_reused() -> None:
    part, addresses = explicit_part(plain_network(MODEL), "bf16", ONE), set()
    for _ in range(3):
        run_layers(part, *inputs("bf16", 2), ONE)
        attention = part.layers[0].attention
        addresses.add(tuple(linear.weight.grad.data_ptr() for linear in (attention.q, attention.k, attention.v)))
    (first,) = addresses
    assert [place - first[0] for place in first] == [0, 64 * 64 * 4, (64 + 32) * 64 * 4]


def test_first_gradients_are_written_to_main_grad() -> None:
    expected = explicit_result("bf16", ONE, 2).grads
    part = explicit_part(plain_network(MODEL), "bf16", ONE)
    memory = {}
    for name, weight in part.layers.named_parameters():
        memory[name] = weight.main_grad = torch.full_like(weight, torch.nan, dtype=torch.float32)
    for layer in part.layers:
        for linears in layer.merged_linears:
            merged = torch.cat([linear.weight.main_grad for linear in linears])
            for linear, grad in zip(linears, merged.split([len(linear.weight) for linear in linears]), strict=True):
                linear.weight.main_grad = grad
    result = run_layers(part, *inputs("bf16", 2), ONE)
    for name, weight in part.layers.named_parameters():
        assert weight.grad is weight.main_grad or weight.ndim == 1  # vectors have memory of their own
        assert torch.equal(result.grads[name], expected[name])


@pytest.mark.parametrize("scaling", [DelayedScaling, CurrentScaling])
@pytest.mark.parametrize("recomputed", [False, True])
def test_fp8_weights_of_a_pass_equal_those_of_a_step(scaling: type, recomputed: bool) -> None:
    results = []
    for stay in (True, False):
        part = explicit_part(plain_network(MODEL), "fp8", ONE, scaling, recomputed)
        for layer in explicit_layers(part):
            layer.weights_stay = stay
            if not stay:
                layer.fp8_weights = None
        results.append(run_layers(part, *inputs("fp8", 2), ONE))
    assert worst(*results) == 0


def test_fp8_weights_are_refreshed_by_begin_step() -> None:
    part = explicit_part(plain_network(MODEL), "fp8", ONE)
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
    part = explicit_part(stage, "fp8", ONE)
    assert part.fp8_scaling is not None
    assert {name.rpartition(".")[0] for name in part.fp8_scaling.state_dict()} == {"layers.1"}


def test_widths_that_fp8_does_not_take_are_computed_in_bf16() -> None:
    narrow = replace(MODEL, ffn=72)
    results = [explicit_result(dtype, ONE, 2, narrow) for dtype in ("bf16", "fp8")]
    assert worst(*results) == 0


@pytest.mark.parametrize("fp8_fast_accum", [False, True])
def test_fast_accumulation_of_backward_gemms(monkeypatch, fp8_fast_accum: bool) -> None:
    counts = Counter[bool]()

    def count_matmul(*operands: Tensor, fast: bool = False, **kwargs: object) -> Tensor:
        counts[fast] += "scales" in kwargs
        return matmul(*operands, fast=fast, **kwargs)

    monkeypatch.setattr("llmb.models.llama_layer.linear_gemms.matmul", count_matmul)
    explicit_result("fp8", ONE, 2, fp8_fast_accum=fp8_fast_accum)
    # Two layers of seven matrices; gate and up are merged, in the backward pass also q, k and v.
    forward, back = 2 * 6, 2 * 2 * 4
    assert counts[True] == forward + fp8_fast_accum * back
    assert counts[False] == (not fp8_fast_accum) * back


def test_fast_accumulation_needs_fp8(trained) -> None:
    refused = trained(dtype="bf16", fp8_fast_accum=True, steps=1)
    assert "does not run fp8_fast_accum=true with dtype=bf16" in refused.ended().reason


def config_of(dtype: str, **changes: object) -> RunConfig:
    """Return a configuration of an H200, whose code runs on any device."""
    config = changed(CONFIG, dtype=dtype, **({"mbs": 2, "gbs": 4, "ga": 2, "lr": 1e-3} | changes))
    return replace(config, model=MODEL, machine=replace(config.machine, gpu="h200"))


def add_gradients(model_part: Network) -> list[float]:
    """Return the losses of two micro-batches."""
    losses = []
    for micro in range(2):
        tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(micro))
        loss = model_part(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_recomputed_and_offloaded_layers_give_the_same_bits(dtype: str) -> None:
    runs = []
    for changes in ({}, {"recompute_layers": 1}, {"offload_layers": 1}):
        config = config_of(dtype, **changes)
        (part,) = build_model_parts(config, config.workload, ONE)
        assert len(explicit_layers(part)) == 2
        begin_step(part)
        runs.append((add_gradients(part), {name: p.grad for name, p in part.named_parameters()}))
    for losses, grads in runs[1:]:
        assert losses == runs[0][0]
        torch.testing.assert_close(grads, runs[0][1], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fp8_run_resumes_from_checkpoint(tmp_path: Path) -> None:
    """Bit-exactly, with its scales."""

    def run(steps: range) -> list[float]:
        config = config_of("fp8", checkpoint_every=3 if steps.start == 1 else None)
        work = config.workload
        model_parts = build_model_parts(config, work, ONE)
        optimizer = build_optimizer(model_parts, work, ONE)
        losses = []
        with Checkpointer(tmp_path, config, work, ONE, model_parts, optimizer) as checkpointer:
            if steps.start > 1:
                checkpointer.load(tmp_path / "checkpoints" / f"step_{steps.start - 1}")
            for step in steps:
                begin_step(model_parts[0])
                losses += add_gradients(model_parts[0])
                sharded_parameters(model_parts[0]).end_step()
                optimizer.update(1e-3)
                checkpointer.after_step(step)
        return losses

    straight = run(range(1, 7))
    assert straight[-1] < straight[0]
    assert run(range(4, 7)) == straight[6:]
