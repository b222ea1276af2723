"""Hugging Face folders: every stored format is dequantized, whole or sharded, under our names."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import deepseek_model, grok1_model, llama_model, nemotron_h_model
from torch import Tensor

from llmb.config.model import MambaConfig, MlaConfig, Model, MoEConfig, RopeConfig
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.hf_weights import save_weights
from llmb.ops.gemm.block_scaled_gemm import quantize_blocks
from llmb.ops.quant.activation_quant import E4M3, PerTokenFp8, quantize_activation
from llmb.ops.quant.fp8_quant import cast_to_fp8, tensor_scale
from llmb.ops.quant.nvfp4 import Nvfp4, dequantize_nvfp4, quantize_nvfp4
from llmb.serve.weights.hf_folder import HfFolderWeights
from llmb.serve.weights.weight_source import WeightShard

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden": 128, "ffn": 320, "heads": 4, "vocab": 96}
LLAMA = llama_model(name="llama", **SIZES)
DEEPSEEK = deepseek_model(
    name="deepseek",
    norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=4.0, original_tokens=32, mscale_all_dim=1.0),
    experts=MoEConfig(
        count=4, top_k=2, ffn=64, shared=1, dense_layers=1, groups=2, top_groups=1, score="sigmoid", scale=2.5
    ),
    mla=MlaConfig(q_rank=64, kv_rank=48, nope_dim=32, rope_dim=16, value_dim=32),
    **SIZES,
)
NEMOTRON = nemotron_h_model(
    name="nemotron_h", pattern="M*-", mamba=MambaConfig(heads=4, head_dim=16, groups=2, state=16, chunk=16), **SIZES
)
GROK = grok1_model(name="grok1", layers=1, experts=MoEConfig(count=4, top_k=2, ffn=64, renormalise=False), **SIZES)
MODELS = [LLAMA, replace(LLAMA, name="tied", tied_embeddings=True), DEEPSEEK, NEMOTRON, GROK]
Tensors = dict[str, Tensor]


def write_weights(model: Model, folder: Path, shard_bytes: float = 5e9, dtype: torch.dtype = torch.float32) -> Tensors:
    """Write a folder of random weights; return them by our names."""
    network = build_model(model)
    network.init_weights(1)
    for index, buffer in enumerate(network.buffers()):
        buffer.copy_(torch.linspace(0, 1, buffer.numel()) + index)
    save_weights(network, folder, dtype, shard_bytes)
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def weights_of(model: Model, folder: Path, dtype: torch.dtype = torch.float32) -> HfFolderWeights:
    return HfFolderWeights(model, folder, dtype, CPU)


def shards_of(tensor: Tensor) -> list[WeightShard]:
    return [WeightShard(dim, 1, 2) for dim, size in enumerate(tensor.shape) if size % 2 == 0] + [WeightShard(0, 0, 1)]


@pytest.mark.parametrize("shard_bytes", [5e9, 100_000])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_every_tensor_and_its_shards(model: Model, shard_bytes: float, tmp_path: Path) -> None:
    tensors = write_weights(model, tmp_path / "w", shard_bytes)
    weights = weights_of(model, tmp_path / "w")
    for name, tensor in tensors.items():
        if name == "head.weight" and model.tied_embeddings:
            continue
        assert torch.equal(weights.load(name), tensor), name
        for shard in shards_of(tensor):
            actual = weights.load(name, shard)
            assert torch.equal(actual, shard.slice(tensor)), (name, shard)
            assert actual.is_contiguous()
    assert weights.notes == ()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_unquantized_weights_are_cast_but_buffers_stay_fp32(stored: torch.dtype, tmp_path: Path) -> None:
    tensors = write_weights(DEEPSEEK, tmp_path / "w", dtype=stored)
    weights = weights_of(DEEPSEEK, tmp_path / "w", torch.bfloat16)
    name = "layers.1.mlp.gate.weight"
    assert torch.equal(weights.load(name), tensors[name].to(stored).bfloat16())
    bias = weights.load("layers.1.mlp.router.bias")
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors["layers.1.mlp.router.bias"])


def as_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    quantized = quantize_blocks(weight)
    outputs, groups = len(weight), weight.shape[1] // 128
    scales = quantized.scales[:, :groups].contiguous()
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs]
    values = quantized.values[:outputs].contiguous()
    return {"weight": values, "weight_scale_inv": scales}, values.float() * spread


def as_tensor_scaled(weight: Tensor) -> tuple[Tensors, Tensor]:
    quantized = cast_to_fp8(weight, tensor_scale(weight, E4M3), E4M3, rows=True)
    return {"weight": quantized.rows, "weight_scale": quantized.scale}, quantized.rows.float() * quantized.scale


def as_channel_scaled(weight: Tensor) -> tuple[Tensors, Tensor]:
    quantized = quantize_activation(weight, "per_token")
    assert isinstance(quantized, PerTokenFp8)
    return {
        "weight": quantized.values,
        "weight_scale": quantized.scales.squeeze(1),
    }, quantized.values.float() * quantized.scales


def as_nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    quantized = quantize_nvfp4(weight)
    return {
        "weight": quantized.packed,
        "weight_scale": quantized.scales,
        "weight_scale_2": quantized.scale,
    }, dequantize_nvfp4(quantized)


STORED: dict[str, Callable[[Tensor], tuple[Tensors, Tensor]]] = {
    "blocks": as_blocks,
    "tensor": as_tensor_scaled,
    "channel": as_channel_scaled,
    "nvfp4": as_nvfp4,
}


def rounded_in_file(folder: Path, form: str) -> Tensors:
    """Quantize the matrices that the format supports; return their dequantized values by their names in the file."""
    file = folder / "model.safetensors"
    tensors, truth = load_file(file), {}
    for name in [name for name in tensors if name.endswith("_proj.weight") and tensors[name].shape[1] % 128 == 0]:
        parts, truth[name] = STORED[form](tensors[name])
        tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    assert truth
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": form}}))
    return truth


@pytest.mark.parametrize("form", STORED)
def test_quantized_tensors_are_dequantized(form: str, tmp_path: Path) -> None:
    write_weights(LLAMA, tmp_path / "w")
    truth = rounded_in_file(tmp_path / "w", form)
    weights = weights_of(LLAMA, tmp_path / "w", torch.bfloat16)
    names = {"attention.q": "self_attn.q_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj"}
    for name, hf_name in names.items():
        whole = truth[f"model.layers.1.{hf_name}.weight"]
        actual = weights.load(f"layers.1.{name}.weight")
        assert actual.dtype == torch.float32
        assert torch.equal(actual, whole)
        for parts in (2, 4, 8):
            for shard in (WeightShard(0, parts - 1, parts), WeightShard(1, 1, parts)):
                assert torch.equal(weights.load(f"layers.1.{name}.weight", shard), shard.slice(whole)), shard
    assert weights.load("norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("form", STORED)
def test_quantizing_again_gives_the_stored_values(form: str, tmp_path: Path) -> None:
    write_weights(LLAMA, tmp_path / "w")
    rounded_in_file(tmp_path / "w", form)
    weights, name = weights_of(LLAMA, tmp_path / "w"), "model.layers.0.mlp.up_proj.weight"
    repeated, _ = STORED[form](weights.load("layers.0.mlp.up.weight"))
    with safe_open(tmp_path / "w" / "model.safetensors", framework="pt") as file:
        stored = {part: file.get_tensor(name.removesuffix("weight") + part) for part in repeated}
    assert torch.equal(repeated["weight"].view(torch.uint8), stored["weight"].view(torch.uint8))
    for part in repeated.keys() - {"weight"}:
        assert torch.allclose(repeated[part].float(), stored[part].float(), rtol=1e-6), part


def test_quantized_experts_are_stacked(tmp_path: Path) -> None:
    write_weights(DEEPSEEK, tmp_path / "w")
    truth = rounded_in_file(tmp_path / "w", "nvfp4")
    weights = weights_of(DEEPSEEK, tmp_path / "w")
    expected = torch.stack([truth[f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"] for expert in range(4)])
    assert torch.equal(weights.load("layers.1.mlp.gate.weight"), expected)
    for shard in (WeightShard(0, 1, 2), WeightShard(1, 1, 2), WeightShard(2, 0, 4)):
        assert torch.equal(weights.load("layers.1.mlp.gate.weight", shard), shard.slice(expected))


def test_column_shard_within_a_scale_group(tmp_path: Path) -> None:
    """128 inputs over 16 ranks are 8 each: half a group of 4-bit numbers."""
    write_weights(LLAMA, tmp_path / "w")
    truth = rounded_in_file(tmp_path / "w", "nvfp4")
    weights, whole = weights_of(LLAMA, tmp_path / "w"), truth["model.layers.0.mlp.up_proj.weight"]
    for index in range(16):
        shard = WeightShard(1, index, 16)
        assert torch.equal(weights.load("layers.0.mlp.up.weight", shard), shard.slice(whole))


def test_nvfp4_low_nibble_comes_first(tmp_path: Path) -> None:
    """A row packed by hand, against an error that packing and unpacking would share."""
    packed = torch.tensor([[0x21] * 8], dtype=torch.uint8)
    plain = dequantize_nvfp4(Nvfp4(packed, torch.full((1, 1), 2.0).to(E4M3), torch.tensor(0.25)))
    assert plain.tolist() == [[0.25, 0.5] * 8]


def test_files_of_other_expert_shards_are_not_read(tmp_path: Path) -> None:
    tensors = write_weights(DEEPSEEK, tmp_path / "w", shard_bytes=40_000)
    weights = weights_of(DEEPSEEK, tmp_path / "w")
    weight_map = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())["weight_map"]
    names = [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(4)]
    for file_name in {weight_map[name] for name in names[2:]} - {weight_map[name] for name in names[:2]}:
        (tmp_path / "w" / file_name).unlink()
    shard = WeightShard(0, 0, 2)
    assert torch.equal(
        weights.load("layers.1.mlp.gate.weight", shard), shard.slice(tensors["layers.1.mlp.gate.weight"])
    )
    with pytest.raises(ConfigError):
        weights.load("layers.1.mlp.gate.weight", WeightShard(0, 1, 2))


def changed(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_ignored_tensors_are_noted(tmp_path: Path) -> None:
    write_weights(DEEPSEEK, tmp_path / "w")
    layer = "model.layers.0.self_attn"
    more = {f"{layer}.o_proj.input_scale": torch.ones(()), f"{layer}.k_proj.k_scale": torch.ones(())}
    more |= {f"model.layers.2.{name}.weight": torch.ones(3) for name in ("eh_proj", "enorm")}
    more |= {f"{layer}.rotary_emb.inv_freq": torch.ones(3), "vision_tower.encoder.weight": torch.ones(3)}
    changed(tmp_path / "w", lambda tensors: tensors.update(more))
    notes = weights_of(DEEPSEEK, tmp_path / "w").notes
    assert sorted(notes) == [
        "1 tensors of the folder are not used: input_scale",
        "1 tensors of the folder are not used: k_scale",
        "1 tensors of the folder are not used: rotary_emb.inv_freq",
        "2 tensors of the folder are not used: multi-token prediction",
    ]


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(UP), f"lacks 1 tensor ({UP})"),
    "extra": (lambda t: t.update(strange=torch.ones(1)), "has 1 tensor (strange) that the model does not"),
    "a layer too many": (lambda t: t.update({"model.layers.2.x": torch.ones(1)}), "(model.layers.2.x)"),
    "shape": (lambda t: t.update({UP: torch.ones(4, 4)}), f"{UP} [4, 4] (the model has [320, 128])"),
    "no scales": (lambda t: t.update({UP: t[UP].to(E4M3)}), f"{UP} (F8_E4M3 without its scales)"),
    "scales of another shape": (
        lambda t: t.update({UP: t[UP].to(E4M3), f"{UP}_scale_inv": torch.ones(1, 1)}),
        f"{UP}_scale_inv [1, 1] (the model has [3, 1])",
    ),
    "4 bits without the scale of the tensor": (
        lambda t: t.update({UP: t[UP][:, :64].to(torch.uint8), f"{UP}_scale": torch.ones(320, 8).to(E4M3)}),
        f"{UP} (U8 without its scales)",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_wrong_folder_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    write_weights(LLAMA, tmp_path / "w")
    change, message = DAMAGE[kind]
    changed(tmp_path / "w", change)
    with pytest.raises(ConfigError) as caught:
        weights_of(LLAMA, tmp_path / "w")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refusal_names_config_fields_that_differ(tmp_path: Path) -> None:
    write_weights(LLAMA, tmp_path / "w")
    with pytest.raises(ConfigError, match=r"holds another model than llama: hidden_size 128 \(the run has 256\)"):
        weights_of(replace(LLAMA, hidden=256), tmp_path / "w")
    with pytest.raises(ConfigError, match="model_type llama"):
        weights_of(DEEPSEEK, tmp_path / "w")
    with pytest.raises(ConfigError, match="num_hidden_layers 2"):
        weights_of(replace(LLAMA, layers=1), tmp_path / "w")


def test_missing_folder_or_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder of weights"):
        weights_of(LLAMA, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        weights_of(LLAMA, tmp_path / "empty")
