"""Each forced fallback on a GPU that needs none: what runs instead agrees with the reference, and is named."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cuda_checks import FP8_GEMM, NEEDS_GPU, randn, relative_error
from small_models import llama_model
from test_serving_engine_gpu import CONFIG, fraction_equal, generate
from training_run import run_config, train, train_to_the_end

from llmb.config.spec import Training
from llmb.events import RunStarted, read
from llmb.models import blocks
from llmb.models.blocks import causal_attention
from llmb.ops import dependent_launch
from llmb.ops.attention.segment_attention import Segment, causal_backward, causal_forward
from llmb.ops.device_capabilities import FEATURES, FORCE, capabilities, forced_fallbacks, scaled_to_sms
from llmb.ops.gemm.block_scaled_gemm import block_scaled_gemm, block_scaled_mm, quantize_blocks
from llmb.ops.gemm.skinny_gemm import SkinnyGemmWeight, skinny_gemm
from llmb.ops.norm.rms_norm import rms_norm
from llmb.ops.quant.activation_quant import quantize_activation

pytestmark = NEEDS_GPU
WORK = Training(seqlen=512, mbs=1, gbs=2, ga=2, steps=3, window=(2, 3), lr=3e-4)
MODEL = llama_model(name="small", layers=2, hidden=512, ffn=1024, heads=4, vocab=1000)


def clear() -> None:
    caches = (capabilities, forced_fallbacks, scaled_to_sms, blocks.attention_backends, dependent_launch._has_pdl)
    for function in caches:
        function.cache_clear()


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that forces fallbacks from then on."""

    def install(names: str) -> None:
        monkeypatch.setenv(FORCE, names)
        clear()

    yield install
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize("forced", ["cudnn_attention", "cudnn_attention,flash_attention"])
def test_attention_without_cudnn_and_without_flash(force, forced: str) -> None:
    q, k, v, dout = (randn(1, heads, 1024, 128, seed=seed) for seed, heads in enumerate((8, 2, 2, 8)))
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v, dout)]
    segments = [Segment(0, 1024, 0, 0)]
    out, lse = causal_forward(*rows[:3], segments, 128**-0.5)
    grads = causal_backward(rows[3], *rows[:3], out, lse, segments, 128**-0.5)
    force(forced)
    assert relative_error(causal_attention(q, k, v), exact) < 0.01
    forced_out, forced_lse = causal_forward(*rows[:3], segments, 128**-0.5)
    assert relative_error(forced_out, exact[0].transpose(0, 1)) < 0.01
    assert relative_error(forced_lse, lse) < 1e-4
    for actual, expected in zip(
        causal_backward(rows[3], *rows[:3], forced_out, forced_lse, segments, 128**-0.5), grads, strict=True
    ):
        assert relative_error(actual, expected) < 0.02


def test_small_kernels_without_dependent_launch(force) -> None:
    x, weight, norm = randn(2, 4096), randn(6144, 4096, seed=1) * 4096**-0.5, randn(4096, seed=2)
    expected = skinny_gemm.reference(x, SkinnyGemmWeight(weight), torch.bfloat16)
    normed = torch.empty_like(x)
    force("pdl")
    assert dependent_launch.pdl_options(1) == {"USE_PDL": False}
    assert relative_error(skinny_gemm(x, SkinnyGemmWeight(weight), torch.bfloat16), expected) < 0.01
    rms_norm(x, norm, 1e-5, normed)
    exact = torch.nn.functional.rms_norm(x.float(), (4096,), norm.float(), 1e-5)
    assert relative_error(normed, exact) < 0.01


def test_ops_without_triton_run_their_references(force) -> None:
    x, weight = randn(3, 1024), randn(2048, 1024, seed=1)
    expected = skinny_gemm.reference(x, SkinnyGemmWeight(weight), torch.bfloat16)
    force("triton")
    assert torch.equal(skinny_gemm(x, SkinnyGemmWeight(weight), torch.bfloat16), expected)


@FP8_GEMM
def test_block_scaled_gemm_without_cublas(force) -> None:
    x, weight = randn(128, 1024), randn(512, 1024, seed=1)
    x8, weight8 = quantize_activation(x, "1x128"), quantize_blocks(weight)
    expected = block_scaled_mm.reference(x8, weight8, 512, torch.bfloat16)
    force("fp8_block_gemm")
    assert relative_error(block_scaled_gemm(x8, weight8, 512, torch.bfloat16), expected) < 0.01


@pytest.mark.parametrize("forced", ["cudnn_attention", "cudnn_attention,flash_attention", "triton"])
def test_training_with_forced_fallbacks_learns_the_same_and_says_so(force, tmp_path: Path, forced: str) -> None:
    config = run_config(MODEL, "bf16", WORK)
    losses = [step.loss for step in train_to_the_end(config, tmp_path / "plain")]
    force(forced)
    steps = train_to_the_end(config, tmp_path / "forced")
    assert [step.loss for step in steps] == pytest.approx(losses, rel=5e-3)
    (started,) = [e for e in read(tmp_path / "forced" / "events.rank0.jsonl") if isinstance(e, RunStarted)]
    assert [line for line in started.fallbacks if FORCE in line] == [
        f"no {FEATURES[name].title} ({FORCE}): {FEATURES[name].instead}"
        for name in FEATURES
        if name in forced.split(",")
    ]


def test_fp8_is_refused_where_it_cannot_run(force, tmp_path: Path) -> None:
    force("fp8_gemm")
    steps, ended = train(run_config(MODEL, "fp8", WORK), tmp_path)
    assert (steps, ended.status) == ([], "failed")
    assert "dtype=fp8 needs a GPU of compute capability 8.9 or more" in (ended.reason or "")
    assert "choose bf16" in (ended.reason or "")


def test_serving_without_dependent_launch_generates_the_same_tokens(force) -> None:
    expected = generate(CONFIG)
    force("pdl")
    assert fraction_equal(generate(CONFIG), expected) > 0.9
