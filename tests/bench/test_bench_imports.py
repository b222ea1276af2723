"""Programs of bench/, docs/ and examples/ import only what exists. Most need a GPU: nothing else runs their imports."""

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
OUR_MODULES = {"llmb", *(path.stem for path in BENCH.iterdir())}
PROGRAMS = [path for folder in ("bench", "docs", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.fixture(autouse=True)
def bench_path(monkeypatch):
    """As `python bench/PROGRAM.py` has it."""
    monkeypatch.syspath_prepend(str(BENCH))


def imported_names(path: Path) -> list[tuple[str, str]]:
    """Module and name of every `from MODULE import NAME` of ours, those inside functions too."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    return [
        (node.module, alias.name) for node in nodes if node.module.split(".")[0] in OUR_MODULES for alias in node.names
    ]


def importable(module: str, name: str) -> bool:
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        return str(error.name).split(".")[0] not in OUR_MODULES  # a peer that is not installed here
    return hasattr(loaded, name) or (hasattr(loaded, "__path__") and find_spec(f"{module}.{name}") is not None)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_exist(path):
    assert [f"{module}.{name}" for module, name in imported_names(path) if not importable(module, name)] == []


def test_an_absent_name_is_noticed():
    assert not importable("llmb.train.parallel.pipeline", "no_such_name")
    assert not importable("llmb.no_such_module", "name")
    assert importable("llmb.train", "loop")
    assert len(PROGRAMS) > 80
    assert sys.path[0] == str(BENCH)
