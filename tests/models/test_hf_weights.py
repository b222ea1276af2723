"""Weight files and `transformers`: either side reads what the other wrote and computes the same logits."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cases import DENSE_CASES
from mixture_cases import MIXTURE_CASES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import (
    GROUPED_MOE,
    MLA,
    deepseek_model,
    glm4_moe_model,
    gpt_oss_model,
    grok1_model,
    llama_model,
    mixtral_model,
    nemotron_h_model,
    qwen3_moe_model,
)

from llmb.config.huggingface.hf_config import HF_ARCHITECTURES
from llmb.config.model import Model, MoEConfig, RopeConfig
from llmb.errors import ConfigError, LaunchError
from llmb.models.architectures import ARCHITECTURES, build_model
from llmb.models.hf_weights import hf_tensors, load_weights, plan_shards, save_weights

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5  # relative to the largest logit, fp32
SIZES: dict[str, Any] = {"hidden": 48, "ffn": 80, "heads": 4, "vocab": 97}
LLAMA = llama_model(name="llama", **SIZES)
MODELS = [
    LLAMA,
    replace(LLAMA, name="llama-tied", tied_embeddings=True, norm_eps=1e-6),
    replace(LLAMA, name="llama-scaled", rope=RopeConfig(scaling="llama3", factor=8.0, original_tokens=64)),
    deepseek_model(
        name="deepseek",
        layers=3,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=4.0, original_tokens=32, mscale_all_dim=1.0),
        experts=replace(GROUPED_MOE, top_k=2),
        mla=replace(MLA, kv_rank=16),
        **SIZES,
    ),
    nemotron_h_model(name="nemotron_h", head_dim=16, **SIZES),
    mixtral_model(name="mixtral", **(SIZES | {"ffn": 24})),
    qwen3_moe_model(name="qwen3_moe", **SIZES),
    gpt_oss_model(name="gpt_oss", **(SIZES | {"ffn": 32})),
    glm4_moe_model(name="glm4_moe", **SIZES),
]
GROK = grok1_model(name="grok1", experts=MoEConfig(count=4, top_k=2, ffn=24, renormalise=False), **SIZES)


def randomize(network: torch.nn.Module) -> None:
    """Set random values large enough that every tensor matters, norms and biases included."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if not name.endswith(("A_log", "a_log", "dt_bias")):  # keeps the recurrence stable
                tensor.copy_(torch.randn_like(tensor) * 0.15 + (tensor.ndim == 1))


def network_of(model: Model) -> Any:
    network = build_model(model)
    network.init_weights(1)
    randomize(network)
    return network


def assert_same_logits(result: Any, hf_output: Any) -> None:
    tokens = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        actual, expected = result(tokens), hf_output(tokens, use_cache=False).logits
    assert expected.abs().max() > 0.1
    assert (actual - expected).abs().max() / expected.abs().max() < TOLERANCE


def test_every_architecture_is_tested() -> None:
    tested = {model.architecture for model in [*MODELS, GROK]}
    assert {ARCHITECTURES[name] for name in tested} == set(ARCHITECTURES.values())
    others = set(ARCHITECTURES) - tested  # of the same networks: test_hf_parity.py, tests/serve/test_dense_models.py
    assert others <= {model.architecture for model in (*DENSE_CASES, *MIXTURE_CASES)} <= set(HF_ARCHITECTURES)


@pytest.mark.parametrize("shard", [5e9, 20_000])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_transformers_loads_saved_weights(model: Model, shard: float, tmp_path: Path) -> None:
    result = network_of(model)
    save_weights(result, tmp_path / "out", torch.float32, shard)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (shard == 20_000)
    hf_output, loading_info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    assert hf_output.dtype == torch.float32
    assert_same_logits(result, hf_output)


@pytest.mark.parametrize("model", [*MODELS, GROK], ids=lambda m: m.name)
def test_roundtrip_is_bit_exact(model: Model, tmp_path: Path) -> None:
    first, second = network_of(model), build_model(model)
    save_weights(first, tmp_path / "out", torch.float32, 30_000)
    load_weights(second, tmp_path / "out")
    assert {*hf_tensors(first)} == {*hf_tensors(second)}
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert (tmp_path / "out" / "config.json").exists() == (model is not GROK)


def test_weights_are_cast_and_buffers_are_not(tmp_path: Path) -> None:
    deepseek = next(m for m in MODELS if m.architecture == "deepseek")
    network = network_of(deepseek)
    save_weights(network, tmp_path / "out", torch.bfloat16)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in hf_tensors(network).items():
        is_buffer = name.endswith("e_score_correction_bias")
        assert torch.equal(stored[name], tensor.value(torch.float32 if is_buffer else torch.bfloat16)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_plan_shards() -> None:
    sizes = {"a": 4, "b": 4, "c": 3, "d": 20, "e": 1, "f": 9}
    assert plan_shards(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert plan_shards(sizes, 1000) == [[*sizes]]


def test_shards_and_index(tmp_path: Path) -> None:
    save_weights(network_of(LLAMA), tmp_path / "out", torch.float32, 20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert [f.name for f in files] == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    weight_map = {}
    for file in files:
        with safe_open(file, "pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), file.name)
        assert file.stat().st_size < 20_000 + 2_000  # its header
    assert weight_map == index["weight_map"]
    bytes_of = (math.prod(t.shape) * 4 for t in hf_tensors(network_of(LLAMA)).values())
    assert index["metadata"]["total_size"] == sum(bytes_of)


def remove_tensors(file: Path, part: str) -> None:
    save_file({name: tensor for name, tensor in load_file(file).items() if part not in name}, file)


def add_tensor(name: str, *shape: int) -> Callable[[Path, Path], None]:
    return lambda _folder, file: save_file(load_file(file) | {name: torch.zeros(shape)}, file)


def truncate(_folder: Path, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


INDEX = "model.safetensors.index.json"
# Bytes of a shard, what happens to the folder and to one of its files, and the message.
DAMAGES: list[tuple[float, Callable[[Path, Path], Any], str]] = [
    (1e9, lambda _f, file: remove_tensors(file, "model.norm.weight"), "lacks 1 tensor (model.norm.weight)"),
    (
        1e9,
        lambda _f, file: remove_tensors(file, "layers"),
        "lacks 18 tensors (model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight, "
        "model.layers.0.mlp.gate_proj.weight, ...)",
    ),
    (1e9, add_tensor("model.layers.2.norm", 4), "has 1 tensor (model.layers.2.norm) that the model does not"),
    (1e9, add_tensor("model.norm.weight", 47), "(model.norm.weight [47] (the model has [48])) of another shape"),
    (1e9, truncate, "FILE is cut off or not a safetensors file"),
    (1e9, lambda _f, file: file.write_text("weights"), "is cut off or not a safetensors file"),
    (1e9, lambda _f, file: file.unlink(), "holds neither model.safetensors nor model.safetensors.index.json"),
    (1e9, lambda folder, _: shutil.rmtree(folder), "holds neither model.safetensors nor"),
    (32_000, lambda _f, file: file.unlink(), "index.json names 1 file (FILE) not there"),
    (32_000, truncate, "FILE is cut off"),
    (32_000, lambda folder, _: (folder / INDEX).write_text("{}"), "index.json has no weight_map"),
    (32_000, lambda folder, _: (folder / INDEX).write_text("{"), "index.json is not valid JSON"),
    (32_000, lambda _f, file: save_file({"x": torch.zeros(1)}, file), "has 1 tensor (x) that the model does not"),
]


@pytest.mark.parametrize(("shard", "damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_damaged_folder_is_rejected_and_the_network_unchanged(
    shard: float, damage: Callable, message: str, tmp_path: Path
) -> None:
    folder, network = tmp_path / "out", build_model(LLAMA)
    save_weights(network_of(LLAMA), folder, torch.float32, shard)
    file = sorted(folder.glob("*.safetensors"))[-1]
    damage(folder, file)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ConfigError) as error:
        load_weights(network, folder)
    assert message.replace("FILE", file.name) in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def edit_file(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


TIED = replace(LLAMA, name="llama-tied", tied_embeddings=True)


@pytest.mark.parametrize("prefixes", [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_the_text_model_of_a_folder_with_a_vision_tower_is_loaded(prefixes: tuple[str, str], tmp_path: Path) -> None:
    """Files of Gemma 3 hold both, under names of older and of newer versions."""
    text, other = prefixes
    network, result = network_of(TIED), build_model(TIED)
    save_weights(network, tmp_path / "out", torch.float32)
    vision = {
        f"{other}{name}.weight": torch.ones(2, 3) for name in ("vision_tower.encoder", "multi_modal_projector.mm")
    }
    edit_file(
        tmp_path / "out",
        lambda tensors: {name.replace("model.", text, 1): tensor for name, tensor in tensors.items()} | vision,
    )
    load_weights(result, tmp_path / "out")
    assert all(torch.equal(tensor, result.state_dict()[name]) for name, tensor in network.state_dict().items())


def test_a_copy_of_a_tied_head_and_rope_frequencies_are_not_needed(tmp_path: Path) -> None:
    network, result, folder = network_of(TIED), build_model(TIED), tmp_path / "out"
    save_weights(network, folder, torch.float32)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    embedding = network.embedding.weight.detach()
    edit_file(folder, lambda tensors: tensors | frequencies | {"lm_head.weight": embedding.clone()})
    load_weights(result, folder)
    assert torch.equal(result.embedding.weight, embedding)
    edit_file(folder, lambda tensors: tensors | {"lm_head.weight": embedding + 1})
    with pytest.raises(ConfigError, match=r"has 1 tensor \(lm_head\.weight\) that the model does not"):
        load_weights(result, folder)


def test_saving_is_atomic_and_never_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(LLAMA)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="used exists already"):
        save_weights(network, tmp_path / "used", torch.float32)
    with pytest.raises(LaunchError, match=r"cannot write .*notes/out: Not a directory"):
        save_weights(network, tmp_path / "used" / "notes" / "out", torch.float32)
    save_weights(network, tmp_path / "empty", torch.float32)
    load_weights(network, tmp_path / "empty")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmb.models.hf_weights.save_file", full)
    with pytest.raises(LaunchError, match=r"cannot write .*out: No space left on device"):
        save_weights(network, tmp_path / "out", torch.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "used"]


MEMORY = """
import resource, sys, torch
from pathlib import Path
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights, save_weights
from llmb.config.model import Model, MoEConfig
from llmb.serve.weights.hf_folder import HfFolderWeights
sys.path.insert(0, sys.argv[2])
from small_models import gpt_oss_model

def now():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def rise(work):
    work()  # once before, so that buffers of libraries are there
    Path("/proc/self/clear_refs").write_text("5")  # the highest use so far is forgotten
    before = now()
    work(again=True)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 - before

shape = dict(architecture="llama", hidden=512, ffn=1024, heads=8, kv_heads=8, head_dim=64, vocab=64)
folder = Path(sys.argv[1])
networks = [build_model(Model(name="wide", layers=layers, **shape)) for layers in (2, 16)]
for network in networks:
    network.init_weights(0)
def save(shard, again=False):
    save_weights(networks[again], folder / f"{shard}{again}", torch.bfloat16, shard)
def load(again=False):
    load_weights(networks[again], folder / f"4000000{again}")
print(rise(lambda again=False: save(4_000_000, again)), rise(load), rise(lambda again=False: save(10**10, again)))
del networks, network
model = gpt_oss_model(hidden=512, ffn=256, vocab=64, layers=2, experts=MoEConfig(count=32, top_k=2, ffn=256, bias=True))
network = build_model(model)
network.init_weights(0)
def serve(again=False):
    source = HfFolderWeights(model, folder / "mxfp4", torch.bfloat16, torch.device("cpu"))
    for name in network.state_dict():
        source.load(name)
for name in ("bf16", "mxfp4"):
    save_weights(network, folder / name, torch.bfloat16, 5_000_000, mxfp4_experts=name == "mxfp4")
    print(rise(lambda again=False: load_weights(network, folder / name)))
print(rise(serve))
"""


@pytest.mark.slow
def test_memory_stays_near_one_shard_and_one_tensor(tmp_path: Path) -> None:
    """A model of 170 MB (84 MB as bf16) in 24 shards of 4 MB, its largest tensor 2 MB.

    And a gpt-oss of 102 MB, 32 experts a layer: their matrices are one tensor of 17 MB as bf16, or 4 MB as MXFP4. It is
    loaded expert by expert; to serve it, one of its two matrices is widened to fp32, 17 MB on the device of the engine.
    """
    command = [sys.executable, "-c", MEMORY, tmp_path, Path(__file__).parents[1]]
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed counts no longer, whatever malloc would keep
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    sharded, loaded, at_once, stacked, widened, served = map(int, done.stdout.split())
    assert len(list((tmp_path / "4000000True").glob("*.safetensors"))) == 24
    assert sharded < 7e6
    assert loaded < 4e6
    assert at_once > 60e6, "the measure sees what one large shard costs"
    assert len(list((tmp_path / "mxfp4").glob("*.safetensors"))) > 2
    assert stacked < 6e6
    assert widened < 10e6
    assert served < 17e6 + 4e6 + 10e6
