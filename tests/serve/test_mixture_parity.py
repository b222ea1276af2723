"""Mixtures of experts served token for token as `transformers` generates, also with MXFP4 experts kept in 4 bits."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from mixture_cases import MIXTURE_CASES, NIGHTLY_MIXTURES
from safetensors.torch import load_file, save_file
from small_served import (
    CPU,
    MAX_OUTPUT,
    MAX_SEQ_LEN,
    MIXTURES,
    SINGLE_RANK_INFO,
    EagerReplays,
    config_of,
    engine_for,
    reference_outputs,
    serve,
    served_model_for,
    write_weights,
)

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights, save_weights, stored_tensors
from llmb.ops.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from llmb.serve.admission import AdmissionCheck
from llmb.serve.engine_builder import build_engine, serving_dtypes
from llmb.serve.layers.served_linear import UnquantizedLinear, build_linear
from llmb.serve.layers.served_model import ServingDtypes, build_served_model
from llmb.serve.layers.served_moe import ServedMoe
from llmb.serve.rank_groups import RankGroups
from llmb.serve.request import Request
from llmb.serve.step_graphs import GraphSize
from llmb.serve.weights.hf_folder import HfFolderWeights

GPT_OSS = MIXTURES[-1]


def requests_for(prompts: list[list[int]]) -> list[Request]:
    return [Request(request_id=n, prompt=prompt, max_tokens=MAX_OUTPUT) for n, prompt in enumerate(prompts)]


# The cache of `transformers` keeps all keys of a window of 1.
VARIANTS = [replace(model, window=model.window and model.window + 1) for model in MIXTURE_CASES]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            model,
            marks=[pytest.mark.nightly] if model.name in NIGHTLY_MIXTURES else [],
            id=f"{model.architecture}-{model.name}",
        )
        for model in (*MIXTURES, *VARIANTS)
    ],
)
def test_built_engine_equals_transformers(model: Model, tmp_path: Path) -> None:
    scale = 0.2 if model in MIXTURES else 0.3  # with which no two tokens are nearly as likely
    pool = reference_outputs(model, write_weights(model, tmp_path / "weights", scale))
    assert pool.margin > 1e-4
    config = config_of(model, tmp_path / "weights")
    engine = build_engine(config, SINGLE_RANK_INFO, MAX_SEQ_LEN)
    assert serve(engine, requests_for(pool.prompts)).tokens() == pool.outputs
    if model is not GPT_OSS:  # whose windows are shorter than a prompt
        return
    chunked = engine_for(served_model_for(config), blocks=60, block_tokens=4, max_num_tokens=7, max_batch_size=4)
    windows = chunked.scheduler.windows
    assert windows is not None
    assert windows.pool.num_blocks < 60, "layers with a window have fewer blocks"
    assert serve(chunked, requests_for(pool.prompts)).tokens() == pool.outputs


def test_window_blocks_of_preempted_sequences(tmp_path: Path) -> None:
    """Too few blocks for a batch that is admitted without a prediction, in steps of the sizes of CUDA graphs."""
    pool = reference_outputs(GPT_OSS, write_weights(GPT_OSS, tmp_path / "weights"))
    model = served_model_for(config_of(GPT_OSS, tmp_path / "weights"))
    engine = engine_for(model, blocks=16, block_tokens=4, max_num_tokens=20, max_batch_size=6)
    EagerReplays.of(engine, GraphSize(6, 6), GraphSize(6, 20, 6))
    with mock.patch.object(AdmissionCheck, "try_admit", return_value=True):
        assert serve(engine, requests_for(pool.prompts)).tokens() == pool.outputs
    assert engine.scheduler.windows is not None
    assert engine.scheduler.num_preemptions > 0


def test_prefix_cache_keeps_whole_sequences_in_all_layers(tmp_path: Path) -> None:
    model = served_model_for(config_of(GPT_OSS, write_weights(GPT_OSS, tmp_path / "weights")))
    shared = engine_for(model, block_tokens=4, prefix_cache=True)
    assert shared.scheduler.windows is None
    assert engine_for(model, block_tokens=4, longest=GPT_OSS.window).scheduler.windows is None, "nothing to free"


@pytest.fixture
def mxfp4_folder(tmp_path: Path) -> Path:
    """A folder as published: experts as *_blocks and *_scales."""
    network = build_model(GPT_OSS)
    load_weights(network, write_weights(GPT_OSS, tmp_path / "weights"))
    save_weights(network, tmp_path / "mxfp4", torch.float32, mxfp4_experts=True)
    return tmp_path / "mxfp4"


def test_mxfp4_tensors_have_the_published_names_and_shapes(mxfp4_folder: Path) -> None:
    stored, experts = stored_tensors(mxfp4_folder), "model.layers.0.mlp.experts"
    assert GPT_OSS.experts is not None
    count, width, hidden = GPT_OSS.experts.count, GPT_OSS.experts.ffn, GPT_OSS.hidden
    assert {name.removeprefix(experts): (tensor.dtype, tensor.shape) for name, tensor in stored.items()
            if name.startswith(experts)} == {
        ".gate_up_proj_blocks": ("U8", [count, 2 * width, hidden // 32, 16]),
        ".gate_up_proj_scales": ("U8", [count, 2 * width, hidden // 32]),
        ".gate_up_proj_bias": ("F32", [count, 2 * width]),
        ".down_proj_blocks": ("U8", [count, hidden, width // 32, 16]),
        ".down_proj_scales": ("U8", [count, hidden, width // 32]),
        ".down_proj_bias": ("F32", [count, hidden]),
    }  # fmt: skip


def test_mxfp4_experts_are_served_from_4_bits(mxfp4_folder: Path, tmp_path: Path) -> None:
    """The same tokens as of the dequantized weights, by `transformers`."""
    dequantized = build_model(GPT_OSS)
    load_weights(dequantized, mxfp4_folder)
    original = build_model(GPT_OSS)
    load_weights(original, tmp_path / "weights")
    for name, weight in original.named_parameters():
        is_expert = name.endswith(("gate.weight", "up.weight", "down.weight"))
        expected = dequantize_mxfp4(quantize_mxfp4(weight.detach())) if is_expert else weight
        assert torch.equal(dequantized.get_parameter(name), expected), name
    save_weights(dequantized, tmp_path / "dequantized", torch.float32)
    pool = reference_outputs(GPT_OSS, tmp_path / "dequantized")
    source = HfFolderWeights(GPT_OSS, mxfp4_folder, torch.float32, CPU)
    dtypes = ServingDtypes(torch.float32, "mxfp4", torch.float32)
    model = build_served_model(GPT_OSS, source, dtypes, RankGroups(device=CPU))
    moe = next(mixer for mixer in model.mixers() if isinstance(mixer, ServedMoe))
    assert moe.gate_up.format == moe.down.format == "mxfp4"
    assert serve(engine_for(model), requests_for(pool.prompts)).tokens() == pool.outputs


def test_dtype_mxfp4_quantizes_experts_only() -> None:
    config = config_of(GPT_OSS, None)
    dtypes = serving_dtypes(replace(config, precision=replace(config.precision, dtype="mxfp4", kv_dtype="bf16")))
    assert dtypes == ServingDtypes(torch.bfloat16, "mxfp4", torch.bfloat16)
    layer = build_linear(torch.randn(8, 64), format="mxfp4", dtype=torch.bfloat16)
    assert isinstance(layer, UnquantizedLinear)
    assert not layer.dequantised


def test_missing_scales_are_named(mxfp4_folder: Path) -> None:
    file = mxfp4_folder / "model.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(file).items() if "1.mlp.experts.down_proj_scales" not in name}, file
    )
    with pytest.raises(ConfigError, match=r"lacks 1 tensor \(model.layers.1.mlp.experts.down_proj\)"):
        served_model_for(config_of(GPT_OSS, mxfp4_folder))
