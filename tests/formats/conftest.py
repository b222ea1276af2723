"""A small folder of weights."""

import json
import shutil
from pathlib import Path

import pytest

from llmb.formats.weight_folder import INDEX


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A small model in three shards, written as published ones are."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("good")
    places, total = {}, 0
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.safetensors"
        tensors = {f"layers.{number}.{item}": torch.full((8, number), number).bfloat16() for item in "abc"}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return folder


@pytest.fixture
def folder(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "weights"))
