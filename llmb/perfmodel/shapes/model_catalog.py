"""Shapes of published models by name, from `model_catalog.yaml` and the shipped recipes.

find_model("llama3.1", "405b").model.layers       -> 126
find_model("qwen3-30b-a3b").model.experts.count   -> 128
find_model("Qwen/Qwen3-8B-FP8").model.layers      -> 36
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llmb.config.model import Model
from llmb.config.recipe import load, shipped
from llmb.config.serialization import build
from llmb.errors import UnknownName
from llmb.formats.yaml_file import load_yaml

SHAPE_FIELDS = ("window", "window_layers", "checkpoint", "expert_bias", "mtp_depth", "mtp_blocks", "max_positions")
# Of a checkpoint on Hugging Face: how it was tuned, in which month, its format, its version.
SUFFIXES = re.compile(
    r"(-instruct|-thinking|-chat|-it|-base|-terminus)?(-hf)?(-\d{4})?(-fp8|-fp4|-nvfp4|-bf16|-mxfp4)?(-v\d+(\.\d+)?)?$"
)
PREFIXES = ("meta-", "nvidia-")
CATALOG_FILE = Path(__file__).with_name("model_catalog.yaml")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model, the sliding window that some of its attention layers have, and its multi-token prediction (MTP)."""

    model: Model
    window: int | None = None  # tokens that a query of a windowed layer attends to
    window_layers: int = 0
    checkpoint: str | None = None  # dtype of the published weights; none: bf16
    expert_bias: bool = False  # projections of experts have biases
    mtp_depth: int = 0  # tokens predicted beyond the next one, each by one more pass through the MTP blocks and head
    mtp_blocks: tuple[str, ...] = ()  # kinds of block of one pass; passes share their weights
    max_positions: int | None = None  # tokens of a sequence that the published model is made for; none: not known

    def context_note(self, tokens: int) -> str | None:
        """Return a warning of sequences longer than the model's context; their times are predicted all the same."""
        if self.max_positions is None or tokens <= self.max_positions:
            return None
        return (
            f"{tokens} tokens are more than the {self.max_positions} of {self.model.name}'s context "
            "(max_position_embeddings): as fast with random weights, but the published ones know no later positions"
        )

    @property
    def mtp_layers(self) -> int:
        """Layers that the passes add to the stack: a layer of a hybrid is one block, of others two."""
        return self.mtp_depth * len(self.mtp_blocks) // (1 if self.model.pattern else 2)


def run_shape(model: Model) -> ModelShape:
    """Return the shape of a model that runs here, whose window is a field of its own."""
    return ModelShape(model=model, window=model.window, window_layers=model.window_layers)


def find_model(name: str, size: str = "") -> ModelShape:
    """Return the shape of a model by its name, or by family and size; unknown names list the known ones.

    A name may have the owner and the suffixes of a checkpoint on Hugging Face.
    """
    names = catalog_names()
    base = name.rsplit("/", 1)[-1].lower().replace(" ", "-")
    short = SUFFIXES.sub("", base)
    for prefix in PREFIXES:
        short = short.removeprefix(prefix)
    full_name = f"{base}-{size}".lower() if size else base
    for candidate in (full_name, base, short, short.replace("llama-", "llama")):
        key = names.get(candidate.replace("_", "-")) or names.get(candidate)
        if key is not None:
            return _shape(key)
    raise UnknownName("model", full_name, sorted(set(names.values())))


def is_catalog_name(name: str) -> bool:
    """Return whether `find_model` knows a name."""
    try:
        find_model(name)
    except UnknownName:
        return False
    return True


@cache
def catalog_names() -> dict[str, str]:
    """Return every name and alias, in lower case, with the key of its entry."""
    names: dict[str, str] = {}
    for section in _catalog().values():
        for key, entry in section.items():
            names |= dict.fromkeys([key, *entry.get("aliases", ())], key)
    return names


@cache
def _catalog() -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = load_yaml(CATALOG_FILE, "sections recipes and models")
    return data


@cache
def _recipe(workload: str) -> Any:
    return load(shipped() / workload / "recipe.yaml")


@cache
def _shape(key: str) -> ModelShape:
    if key in _catalog()["recipes"]:
        fields = dict(_catalog()["recipes"][key])
        model = _recipe(fields["recipe"]).model(fields["size"])
    else:
        fields = dict(_catalog()["models"][key])
        sizes = {name: value for name, value in fields.items() if name not in (*SHAPE_FIELDS, "aliases")}
        model = build(Model, {"name": key, "architecture": "llama", **sizes}, f"{CATALOG_FILE.name}: {key}")
    extras = {name: fields[name] for name in SHAPE_FIELDS if name in fields}
    return ModelShape(model=model, **extras | {"mtp_blocks": tuple(extras.get("mtp_blocks", ()))})
