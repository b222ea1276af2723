"""Weights of an out-of-core run, exported: our own loader and `transformers` read them and compute the same."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outofcore_cases import OUTOFCORE_CASES
from safetensors import safe_open
from small_models import llama_model
from torch import Tensor

from llmb.config.huggingface.hf_config import load_hf_config
from llmb.config.model import Model, RopeConfig
from llmb.errors import ConfigError
from llmb.models.architectures import Network, build_model
from llmb.models.hf_weights import load_weights, save_weights
from llmb.offload.bucket_params import param_slices
from llmb.offload.buffer_views import bucket_tensors
from llmb.offload.hf_export import export
from llmb.offload.hf_import import load_hf_buckets
from llmb.perfmodel.offload.buffers import ParamBuckets, padded_numel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import AutoModelForCausalLM, LlamaForCausalLM

SMALL = llama_model(name="llama", layers=3, vocab=100)
MODELS = [
    SMALL,
    replace(SMALL, name="parts", vocab=701),  # three parts of the embedding and of the head, the last smaller
    replace(SMALL, name="tied", vocab=701, tied_embeddings=True),
    replace(SMALL, name="scaled", rope=RopeConfig(scaling="llama3", factor=8.0, original_tokens=64)),
]


def network_of(model: Model) -> Network:
    torch.manual_seed(3)
    network = build_model(model)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1))
    return network


def units_of(network: Network, dtype: torch.dtype) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The network's weights as a run holds them."""
    buckets = ParamBuckets(network.model)
    for bucket in range(buckets.count):
        size = padded_numel(buckets.tensors(bucket))
        numbers = torch.full((size,), torch.nan, dtype=dtype)  # what lies between tensors is no weight
        inside = bucket_tensors(numbers, buckets.tensors(bucket))
        for place in param_slices(network.model, bucket):
            inside[place.tensor][place.rows] = network.get_parameter(place.name).detach()[place.source]
        yield bucket, {"param": numbers}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("shard_bytes", [30_000, 10**9])
def test_transformers_loads_the_export_and_computes_the_same(tmp_path: Path, model: Model, shard_bytes: int) -> None:
    network = network_of(model)
    assert ParamBuckets(model).vocab_shards == (3 if model.vocab == 701 else 1)
    export(tmp_path / "out", model, units_of(network, torch.float32), shard_bytes)
    assert ((tmp_path / "out" / "model.safetensors.index.json").is_file()) == (shard_bytes == 30_000)
    assert replace(load_hf_config(tmp_path / "out"), name=model.name, rope=model.rope) == model

    result = build_model(model)
    load_weights(result, tmp_path / "out")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, result.state_dict()[name]), name

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    assert isinstance(reference, LlamaForCausalLM)
    tokens = torch.randint(model.vocab, (2, 80), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = network(tokens), reference(tokens).logits
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_export_keeps_the_dtype_and_omits_a_tied_head(tmp_path: Path) -> None:
    network = network_of(MODELS[2])
    export(tmp_path / "out", MODELS[2], units_of(network, torch.bfloat16))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "lm_head.weight" not in names
    assert len(names) == 3 * 9 + 2
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert reference.dtype == torch.bfloat16
    assert torch.equal(reference.lm_head.weight, network.embedding.weight.bfloat16())


@pytest.mark.parametrize("model", OUTOFCORE_CASES, ids=lambda model: f"{model.architecture}-{model.name}")
def test_every_architecture_is_exported(tmp_path: Path, model: Model) -> None:
    """In the layout of files: rows in one tensor, norms with an offset, an expert a tensor, or all in a stack."""
    network, result = network_of(model), build_model(model)
    export(tmp_path / "out", model, units_of(network, torch.float32), shard_bytes=20_000)
    load_weights(result, tmp_path / "out")
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(result.get_parameter(name), parameter, rtol=0, atol=1e-6)  # of 1 + offset
    assert_imported(tmp_path / "out", network, 1e-6)


def assert_imported(folder: Path, network: Network, tolerance: float) -> None:
    """Assert that a run which begins with these files holds the weights of the network."""
    buckets, imported = ParamBuckets(network.model), {}

    @contextmanager
    def edit_tensors(bucket: int) -> Iterator[list[Tensor]]:
        shapes = buckets.tensors(bucket)
        imported[bucket] = bucket_tensors(torch.full((padded_numel(shapes),), torch.nan), shapes)
        yield imported[bucket]

    load_hf_buckets(folder, network.model, edit_tensors, torch.device("cpu"))
    for bucket, tensors in imported.items():
        for place in param_slices(network.model, bucket):
            expected = network.get_parameter(place.name).detach()[place.source]
            torch.testing.assert_close(tensors[place.tensor][place.rows], expected, rtol=0, atol=tolerance)
    assert len(imported) == buckets.count


def test_experts_in_mxfp4_are_imported(tmp_path: Path) -> None:
    gpt_oss = next(model for model in OUTOFCORE_CASES if model.architecture == "gpt_oss")
    model = replace(gpt_oss, hidden=64)  # whole groups of 32
    network, result = network_of(model), build_model(model)
    save_weights(network, tmp_path / "out", torch.float32, mxfp4_experts=True)
    load_weights(result, tmp_path / "out")
    assert not torch.equal(result.layers[0].mlp.up.weight, network.layers[0].mlp.up.weight)
    assert_imported(tmp_path / "out", result, 0.0)


def test_non_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="exists already; weights are written to a new folder"):
        export(tmp_path, SMALL, units_of(network_of(SMALL), torch.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


MEMORY = """
import resource, sys, torch
from pathlib import Path
from llmb.offload.hf_export import export
from llmb.offload.hf_import import load_hf_buckets
from llmb.perfmodel.offload.buffers import ParamBuckets, padded_numel
from llmb.config.model import Model

def now():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def rise(model, folder):
    buckets = ParamBuckets(model)
    slab = [torch.ones(padded_numel(buckets.tensors(bucket)), dtype=torch.bfloat16) for bucket in range(buckets.count)]
    Path("/proc/self/clear_refs").write_text("5")  # the highest use so far is forgotten
    before = now()
    export(folder, model, ((bucket, {"param": elements}) for bucket, elements in enumerate(slab)))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 - before

shape = dict(architecture="llama", hidden=512, ffn=1024, heads=8, kv_heads=8, head_dim=64, vocab=8192)
rise(Model(name="first", layers=1, **shape), Path(sys.argv[1]) / "first")  # so that buffers of libraries are there
print(rise(Model(name="deep", layers=24, **shape), Path(sys.argv[1]) / "deep"))
"""


@pytest.mark.slow
def test_the_host_holds_no_second_copy(tmp_path: Path) -> None:
    """A model of 143 MB as bf16 in one shard, its embedding 8 MB in two parts, as its head."""
    command = [sys.executable, "-c", MEMORY, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert sum(file.stat().st_size for file in (tmp_path / "deep").iterdir()) > 140e6
    assert int(done.stdout) < 25e6  # two vocabularies, joined
