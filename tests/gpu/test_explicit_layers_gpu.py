"""Explicit Llama layers on a GPU: gradients against those of plain layers, and peak memory."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_checks import GPU, HOPPER, NEEDS_GPU, relative_error
from small_models import llama_model
from torch import Tensor
from training_run import losses_and_norms, run_config, train_to_the_end

from llmb.config.model import Model
from llmb.config.spec import RunConfig, Training
from llmb.models.architectures import Network, build_model
from llmb.ops.attention import segment_attention
from llmb.ops.attention.attention_block import PLAIN
from llmb.ops.quant.delayed_scaling import DelayedScaling
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.train.llama_layers import begin_step, explicit_layers
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallelize import build_model_parts
from llmb.train.precision import compute_in_bf16, compute_in_fp8

pytestmark = NEEDS_GPU

MODEL = llama_model(name="4 layers of 8b", layers=4, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=16384)
# Two layers of the width of Gemma 2 2B, with a window shorter than the sequences here.
GEMMA_2 = replace(
    MODEL, name="gemma2", layers=2, hidden=2304, ffn=9216, heads=8, kv_heads=4, head_dim=256, activation="gelu",
    post_norms=True, attn_logit_softcap=50.0, attention_pattern="SF", window=512,
)  # fmt: skip


LossesAndGradients = tuple[list[float], dict[str, Tensor]]  # gradients by parameter name, on the GPU


def config_of(dtype: str = "bf16", model: Model = MODEL, **changes: object) -> RunConfig:
    work = Training(seqlen=1024, mbs=2, gbs=4, ga=2, steps=3, window=(2, 3), lr=1e-3)
    return run_config(model, dtype, replace(work, **changes))  # type: ignore[arg-type]


def build(config: RunConfig) -> Network:
    assert isinstance(config.workload, Training)
    (model,) = build_model_parts(config, config.workload, Mesh(0, 1, GPU))
    assert len(explicit_layers(model)) == config.model.layers
    begin_step(model)
    return model


def losses_and_gradients(model: Network) -> LossesAndGradients:
    """Return losses and gradients of two micro-batches."""
    losses = []
    for micro in range(2):
        tokens = synthetic_tokens(7, 10 * micro, (2, 1025), MODEL.vocab, GPU)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    return losses, {name: _grad(parameter).clone() for name, parameter in model.named_parameters()}


def plain_network(dtype: str, model: Model = MODEL) -> Network:
    """Return a network of plain layers, with the same weights."""
    with GPU:
        network = build_model(model)
    work = config_of(dtype).workload
    assert isinstance(work, Training)
    network.init_weights(work.seed)
    network.loss_weight = 1 / work.ga
    if dtype == "bf16":
        compute_in_bf16(network)
    if dtype == "fp8":
        compute_in_fp8(network, partial(DelayedScaling, device=GPU))
    return network


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.fixture(scope="module")
def exact() -> LossesAndGradients:
    """Plain layers in fp32."""
    return losses_and_gradients(plain_network("fp32"))


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def plain_run(request: pytest.FixtureRequest) -> tuple[str, LossesAndGradients]:
    """A dtype, and what plain layers compute in it."""
    return request.param, losses_and_gradients(plain_network(request.param))


@pytest.mark.parametrize("recompute_layers", [0, 4])
def test_gradients_are_as_close_to_fp32_as_those_of_plain_layers(
    recompute_layers: int, plain_run: tuple[str, LossesAndGradients], exact: LossesAndGradients
) -> None:
    """Random numbers are the worst case of fp8: a third is lost either way."""
    dtype, plain = plain_run
    explicit = losses_and_gradients(build(config_of(dtype, recompute_layers=recompute_layers)))
    assert_as_close(dtype, explicit, plain, exact)


@HOPPER
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_gradients_of_recipes_with_many_scales_are_as_close(recipe: str, exact: LossesAndGradients) -> None:
    """Gradients in e4m3 are rounded less than those in e5m2."""
    config = config_of("fp8")
    config = replace(config, precision=replace(config.precision, fp8_recipe=recipe))
    assert_as_close("fp8", losses_and_gradients(build(config)), losses_and_gradients(plain_network("fp8")), exact)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_gradients_of_gemma2_layers_are_as_close(dtype: str) -> None:
    exact, plain = (losses_and_gradients(plain_network(kind, GEMMA_2)) for kind in ("fp32", dtype))
    for recompute_layers in (0, 2):
        config = config_of(dtype, GEMMA_2, recompute_layers=recompute_layers)
        assert_as_close(dtype, losses_and_gradients(build(config)), plain, exact)


def assert_as_close(
    dtype: str, explicit: LossesAndGradients, plain: LossesAndGradients, exact: LossesAndGradients
) -> None:
    assert explicit[0] == pytest.approx(exact[0], rel={"bf16": 1e-3, "fp8": 0.01}[dtype])
    errors = {
        name: (relative_error(explicit[1][name], grad), relative_error(plain[1][name], grad))
        for name, grad in exact[1].items()
    }
    worse = {name: pair for name, pair in errors.items() if pair[0] > 1.05 * pair[1] + 1e-3}
    assert not worse, f"larger errors than plain layers: {worse}"


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_equal_steps_give_equal_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except cuDNN's attention, whose backward pass adds up d_q in any order."""
    monkeypatch.setattr(segment_attention, "kernel_for", lambda *_: PLAIN)
    first, second = (losses_and_norms(config_of(dtype), Mesh(0, 1, GPU)) for _ in range(2))
    assert [loss for loss, _ in first] == [loss for loss, _ in second]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": GEMMA_2},
        {"model": GEMMA_2, "save_norm_outputs": True},
        {"ga": 1, "gbs": 2},
        {"recompute_layers": 3},
        {"moments": "bf16"},
        {"gradients": "bf16", "master_weights": "bf16"},
        {"save_norm_outputs": True},
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_peak_memory_is_the_estimate(tmp_path: Path, dtype: str, settings: dict) -> None:
    config = config_of(dtype, seqlen=8192, **settings)
    allocated = torch.cuda.memory_allocated()  # by fixtures of this module
    steps = train_to_the_end(config, tmp_path)
    assert steps[-1].memory_bytes is not None
    assert steps[-1].memory_bytes - allocated == pytest.approx(memory_estimate(config).total, rel=0.03)
