"""The import table of the design: who may import whom, and that the command line never imports torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "llmb"
# In this order, each may import those before it.
GROUND = [
    "errors", "plain", "lanes", "tokenfile", "plan", "spec", "hardware", "layout", "schedule", "costs", "share",
    "traffic", "activations", "occupancy", "serving_fit", "memory", "rehearsed", "metrics", "events",
]  # fmt: skip
RESOLVING = [
    "settings", "recipes", "selection", "serving", "shrink", "standins", "scaledown", "planning", "resolve", "tasks",
    "bulk",
]  # fmt: skip
ALLOWED = {
    **{part: set(GROUND[:i]) for i, part in enumerate(GROUND)},
    "recipes": {"errors", "plain", "spec", "hardware"},
    "settings": {"errors"},
    "shrink": {"spec"},
    "standins": {"errors", "spec"},
    "selection": {"errors", "spec", "hardware", "recipes", "settings"},
    "serving": {"errors", "spec", "hardware", "recipes", "settings"},
    "scaledown": {"errors", "plain", "spec", "layout", "recipes", "selection", "shrink", "standins"},
    "planning": {"errors", "spec", "hardware", "predict"},
    "resolve": {
        *GROUND,
        "predict",
        "planning",
        "recipes",
        "settings",
        "selection",
        "serving",
        "scaledown",
        "standins",
    },
    "tasks": {"errors", "recipes", "selection", "settings"},
    "bulk": {"errors", "plain", "recipes", "settings", "tasks"},
    "shard": set(),
    "checksums": set(),
    "weightfolder": {"errors", "plain", "hardware", "recipes", "shard", "checksums"},
    "predict": {"errors", "plain", "plan", "spec", "hardware", "costs", "lanes"},
    "launch": {"errors", "plain", "spec", "rehearsed", "events"},
    "results": set(GROUND),
    "report": {*GROUND, "predict", "results"},
    "cli": {*GROUND, *RESOLVING, "predict", "launch", "results", "report", "weightfolder"},
    "kernels": {"errors"},
    "models": {"errors", "plain", "spec", "kernels"},
    "layer": {"errors", "spec", "predict", "kernels"},
    "rank": set(GROUND),
    "train": {*GROUND, "kernels", "layer", "models", "rank"},
    "infer": {*GROUND, "kernels", "models", "rank"},
    "outofcore": {*GROUND, "predict", "kernels", "layer", "models", "rank"},
}
DEVICE_SIDE = {"kernels", "layer", "models", "rank", "train", "infer", "outofcore"}


def imports_of(path: Path) -> set[str]:
    """Full names of what a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "llmb":
                found |= {f"llmb.{alias.name}" for alias in node.names}
    return found


def files():
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_part_imports_only_what_the_table_allows(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    names = {name.split(".")[1] for name in imports_of(path) if name.startswith("llmb.")} - {"__version__"}
    assert names - {part} <= ALLOWED[part], f"{part} must not import {names - {part} - ALLOWED[part]}"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_desk_side_never_imports_torch_nor_the_device_side_yaml(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    forbidden = {"yaml", "argcomplete"} if part in DEVICE_SIDE else {"torch", "numpy", "triton"}
    assert not {name.split(".")[0] for name in imports_of(path)} & forbidden


def test_the_command_line_starts_without_torch_yaml_or_json():
    code = (
        "import sys, llmb.cli.run as r; r.parser(); print([m for m in ('torch','yaml','sqlite3') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_no_file_has_a_name_that_explains_nothing():
    vague = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py", "base.py", "manager.py"}
    assert not [p for p in files() if p.name in vague]
