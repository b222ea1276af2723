"""Weights from folders: each stored format gives the numbers it stands for, whole or a rank's share, by our names."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmb.config.spec import Experts, Latent, Mamba, Model, Rope
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.hf_weights import save_weights
from llmb.ops.gemm.block_scaled_gemm import in_blocks
from llmb.ops.gemm.fp8_linear import E4M3, cast, scale_of
from llmb.ops.quant.activation_quant import Rows8, in_form
from llmb.ops.quant.nvfp4 import Nvfp4, from_nvfp4, in_nvfp4
from llmb.serve.weights.hf_folder import FolderWeights
from llmb.serve.weights.weight_source import Cut

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden": 128, "ffn": 320, "heads": 4, "vocab": 96}
LLAMA = Model(name="llama", architecture="llama", layers=2, kv_heads=2, head_dim=32, **SIZES)
DEEPSEEK = Model(
    name="deepseek",
    architecture="deepseek",
    layers=2,
    kv_heads=4,
    head_dim=32,
    norm_eps=1e-6,
    rope=Rope(theta=10_000.0, scaling="yarn", factor=4.0, original_tokens=32, mscale_all_dim=1.0),
    experts=Experts(
        count=4, top_k=2, ffn=64, shared=1, dense_layers=1, groups=2, top_groups=1, score="sigmoid", scale=2.5
    ),
    latent=Latent(q_rank=64, kv_rank=48, nope_dim=32, rope_dim=16, value_dim=32),
    **SIZES,
)
NEMOTRON = Model(
    name="nemotron_h",
    architecture="nemotron_h",
    layers=3,
    kv_heads=2,
    head_dim=32,
    gated=False,
    activation="squared_relu",
    rope=None,
    pattern="M*-",
    mamba=Mamba(heads=4, head_dim=16, groups=2, state=16, chunk=16),
    **SIZES,
)
GROK = Model(
    name="grok1",
    architecture="grok1",
    layers=1,
    kv_heads=2,
    head_dim=32,
    activation="gelu",
    post_norms=True,
    tied_embeddings=True,
    attention_cap=30.0,
    experts=Experts(count=4, top_k=2, ffn=64, renormalise=False),
    **SIZES,
)
MODELS = [LLAMA, replace(LLAMA, name="tied", tied_embeddings=True), DEEPSEEK, NEMOTRON, GROK]
Tensors = dict[str, Tensor]


def written(model: Model, folder: Path, shard_bytes: float = 5e9, dtype: torch.dtype = torch.float32) -> Tensors:
    """A folder of random weights; gives them by our names."""
    network = build_model(model)
    network.init_weights(1)
    for index, buffer in enumerate(network.buffers()):
        buffer.copy_(torch.linspace(0, 1, buffer.numel()) + index)
    save_weights(network, folder, dtype, shard_bytes)
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def weights_of(model: Model, folder: Path, dtype: torch.dtype = torch.float32) -> FolderWeights:
    return FolderWeights(model, folder, dtype, CPU)


def cuts_of(tensor: Tensor) -> list[Cut]:
    return [Cut(dim, 1, 2) for dim, size in enumerate(tensor.shape) if size % 2 == 0] + [Cut(0, 0, 1)]


@pytest.mark.parametrize("shard_bytes", [5e9, 100_000])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_every_tensor_of_every_model_whole_or_in_part(model: Model, shard_bytes: float, tmp_path: Path) -> None:
    tensors = written(model, tmp_path / "w", shard_bytes)
    weights = weights_of(model, tmp_path / "w")
    for name, tensor in tensors.items():
        if name == "head.weight" and model.tied_embeddings:
            continue
        assert torch.equal(weights.take(name), tensor), name
        for cut in cuts_of(tensor):
            found = weights.take(name, cut)
            assert torch.equal(found, cut.of(tensor)), (name, cut)
            assert found.is_contiguous()
    assert weights.notes == ()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_wide_numbers_come_in_the_format_asked_for_but_buffers_keep_their_digits(
    stored: torch.dtype, tmp_path: Path
) -> None:
    tensors = written(DEEPSEEK, tmp_path / "w", dtype=stored)
    weights = weights_of(DEEPSEEK, tmp_path / "w", torch.bfloat16)
    name = "layers.1.mlp.gate.weight"
    assert torch.equal(weights.take(name), tensors[name].to(stored).bfloat16())
    bias = weights.take("layers.1.mlp.router.bias")
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors["layers.1.mlp.router.bias"])


def as_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    made = in_blocks(weight)
    outputs, groups = len(weight), weight.shape[1] // 128
    scales = made.scales[:, :groups].contiguous()
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs]
    values = made.values[:outputs].contiguous()
    return {"weight": values, "weight_scale_inv": scales}, values.float() * spread


def as_tensor_scaled(weight: Tensor) -> tuple[Tensors, Tensor]:
    made = cast(weight, scale_of(weight, E4M3), E4M3, rows=True)
    return {"weight": made.rows, "weight_scale": made.scale}, made.rows.float() * made.scale


def as_channel_scaled(weight: Tensor) -> tuple[Tensors, Tensor]:
    made = in_form(weight, "rows8")
    assert isinstance(made, Rows8)
    return {"weight": made.values, "weight_scale": made.scales.squeeze(1)}, made.values.float() * made.scales


def as_nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    made = in_nvfp4(weight)
    return {"weight": made.packed, "weight_scale": made.scales, "weight_scale_2": made.scale}, from_nvfp4(made)


STORED: dict[str, Callable[[Tensor], tuple[Tensors, Tensor]]] = {
    "blocks": as_blocks,
    "tensor": as_tensor_scaled,
    "channel": as_channel_scaled,
    "nvfp4": as_nvfp4,
}


def rounded_in_file(folder: Path, form: str) -> Tensors:
    """Rounds the matrices of layers that fit; gives what each stands for, by the names of the file."""
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
def test_numbers_in_fewer_bits_come_out_plain(form: str, tmp_path: Path) -> None:
    written(LLAMA, tmp_path / "w")
    truth = rounded_in_file(tmp_path / "w", form)
    weights = weights_of(LLAMA, tmp_path / "w", torch.bfloat16)
    names = {"attention.q": "self_attn.q_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj"}
    for ours, theirs in names.items():
        whole = truth[f"model.layers.1.{theirs}.weight"]
        found = weights.take(f"layers.1.{ours}.weight")
        assert found.dtype == torch.float32
        assert torch.equal(found, whole)
        for parts in (2, 4, 8):
            for cut in (Cut(0, parts - 1, parts), Cut(1, 1, parts)):
                assert torch.equal(weights.take(f"layers.1.{ours}.weight", cut), cut.of(whole)), cut
    assert weights.take("norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("form", STORED)
def test_rounding_again_gives_the_values_of_the_file(form: str, tmp_path: Path) -> None:
    written(LLAMA, tmp_path / "w")
    rounded_in_file(tmp_path / "w", form)
    weights, name = weights_of(LLAMA, tmp_path / "w"), "model.layers.0.mlp.up_proj.weight"
    again, _ = STORED[form](weights.take("layers.0.mlp.up.weight"))
    with safe_open(tmp_path / "w" / "model.safetensors", framework="pt") as file:
        stored = {part: file.get_tensor(name.removesuffix("weight") + part) for part in again}
    assert torch.equal(again["weight"].view(torch.uint8), stored["weight"].view(torch.uint8))
    for part in again.keys() - {"weight"}:
        assert torch.allclose(again[part].float(), stored[part].float(), rtol=1e-6), part


def test_experts_in_fewer_bits_are_stacked(tmp_path: Path) -> None:
    written(DEEPSEEK, tmp_path / "w")
    truth = rounded_in_file(tmp_path / "w", "nvfp4")
    weights = weights_of(DEEPSEEK, tmp_path / "w")
    wanted = torch.stack([truth[f"model.layers.1.mlp.experts.{one}.gate_proj.weight"] for one in range(4)])
    assert torch.equal(weights.take("layers.1.mlp.gate.weight"), wanted)
    for cut in (Cut(0, 1, 2), Cut(1, 1, 2), Cut(2, 0, 4)):
        assert torch.equal(weights.take("layers.1.mlp.gate.weight", cut), cut.of(wanted))


def test_a_column_cut_within_a_group_of_scales(tmp_path: Path) -> None:
    """128 inputs over 16 ranks are 8 each: half a group of 4-bit numbers."""
    written(LLAMA, tmp_path / "w")
    truth = rounded_in_file(tmp_path / "w", "nvfp4")
    weights, whole = weights_of(LLAMA, tmp_path / "w"), truth["model.layers.0.mlp.up_proj.weight"]
    for index in range(16):
        cut = Cut(1, index, 16)
        assert torch.equal(weights.take("layers.0.mlp.up.weight", cut), cut.of(whole))


def test_low_half_first_in_a_file(tmp_path: Path) -> None:
    """One row by hand, against a mistake that packing and unpacking would share."""
    packed = torch.tensor([[0x21] * 8], dtype=torch.uint8)
    plain = from_nvfp4(Nvfp4(packed, torch.full((1, 1), 2.0).to(E4M3), torch.tensor(0.25)))
    assert plain.tolist() == [[0.25, 0.5] * 8]


def test_files_of_other_ranks_experts_are_not_read(tmp_path: Path) -> None:
    tensors = written(DEEPSEEK, tmp_path / "w", shard_bytes=40_000)
    weights = weights_of(DEEPSEEK, tmp_path / "w")
    places = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())["weight_map"]
    names = [f"model.layers.1.mlp.experts.{one}.gate_proj.weight" for one in range(4)]
    for other in {places[name] for name in names[2:]} - {places[name] for name in names[:2]}:
        (tmp_path / "w" / other).unlink()
    cut = Cut(0, 0, 2)
    assert torch.equal(weights.take("layers.1.mlp.gate.weight", cut), cut.of(tensors["layers.1.mlp.gate.weight"]))
    with pytest.raises(ConfigError):
        weights.take("layers.1.mlp.gate.weight", Cut(0, 1, 2))


def changed(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_is_not_used_is_said(tmp_path: Path) -> None:
    written(DEEPSEEK, tmp_path / "w")
    layer = "model.layers.0.self_attn"
    more = {f"{layer}.o_proj.input_scale": torch.ones(()), f"{layer}.k_proj.k_scale": torch.ones(())}
    more |= {f"model.layers.2.{name}.weight": torch.ones(3) for name in ("eh_proj", "enorm")}
    changed(tmp_path / "w", lambda tensors: tensors.update(more))
    notes = weights_of(DEEPSEEK, tmp_path / "w").notes
    assert sorted(notes) == [
        "1 tensors of the folder are not used: input_scale",
        "1 tensors of the folder are not used: k_scale",
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
def test_a_wrong_folder_is_one_line(kind: str, tmp_path: Path) -> None:
    written(LLAMA, tmp_path / "w")
    change, said = DAMAGE[kind]
    changed(tmp_path / "w", change)
    with pytest.raises(ConfigError) as caught:
        weights_of(LLAMA, tmp_path / "w")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_model_is_named_by_what_differs(tmp_path: Path) -> None:
    written(LLAMA, tmp_path / "w")
    with pytest.raises(ConfigError, match=r"holds another model than llama: hidden_size 128 \(the run has 256\)"):
        weights_of(replace(LLAMA, hidden=256), tmp_path / "w")
    with pytest.raises(ConfigError, match="model_type llama"):
        weights_of(DEEPSEEK, tmp_path / "w")
    with pytest.raises(ConfigError, match="num_hidden_layers 2"):
        weights_of(replace(LLAMA, layers=1), tmp_path / "w")


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder of weights"):
        weights_of(LLAMA, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        weights_of(LLAMA, tmp_path / "empty")
