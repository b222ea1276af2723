"""The import table of the design: which package may import which, and that the command line never imports torch."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from source_imports import imported_names

PACKAGE = Path(__file__).parent.parent / "llmb"
# Importable from one another; `test_the_foundation_has_no_import_cycle` keeps the order among their modules.
FOUNDATION = {"errors", "events", "config", "perfmodel", "formats"}
DESK = FOUNDATION | {"launch", "results", "report", "loadgen"}
ALLOWED = {
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    "launch": FOUNDATION,
    "results": FOUNDATION,
    "loadgen": FOUNDATION,
    "report": FOUNDATION | {"results"},
    "cli": DESK,
    "api": DESK | {"cli"},  # the same functions as the commands, without their text
    "ops": {"errors"},
    "models": {"errors", "config", "ops"},
    "runtime": FOUNDATION,
    "train": FOUNDATION | {"ops", "models", "runtime"},
    "offload": FOUNDATION | {"ops", "models", "runtime"},
    "serve": FOUNDATION | {"ops", "models", "runtime", "loadgen"},
}
DEVICE_SIDE = {"ops", "models", "runtime", "train", "serve", "offload"}
MOST_FILES = 20  # of a package, __init__ and __main__ not counted
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(("llmb", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_the_table_allows(package):
    for path in FILES:
        if package_of(path) == package:
            names = {name.split(".")[1] for name in imported_names(path) if name.startswith("llmb.")} - {"__version__"}
            forbidden = names - {package} - ALLOWED[package]
            assert not forbidden, f"{path} must not import {forbidden}"


def test_every_file_belongs_to_a_package_of_the_table():
    assert {package_of(path) for path in FILES} == set(ALLOWED)


def test_the_foundation_has_no_import_cycle():
    modules = {module_of(path): imported_names(path) for path in FILES if package_of(path) in FOUNDATION}
    edges = {module: names & modules.keys() - {module} for module, names in modules.items()}
    while edges:
        leaves = {module for module, names in edges.items() if not names & edges.keys()}
        assert leaves, f"import cycle among {sorted(edges)}"
        edges = {module: names for module, names in edges.items() if module not in leaves}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_the_desk_side_never_imports_torch_nor_the_device_side_yaml(package):
    forbidden = {"yaml", "argcomplete"} if package in DEVICE_SIDE else {"torch", "numpy", "triton"}
    for path in FILES:
        if package_of(path) == package:
            assert not {name.split(".")[0] for name in imported_names(path)} & forbidden, path


def test_the_command_line_starts_without_torch_yaml_or_sqlite():
    code = (
        "import sys, llmb.cli.llmb_run as r; r.parser()\n"
        "print([m for m in ('torch', 'yaml', 'sqlite3') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_no_file_has_a_name_that_explains_nothing():
    vague = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py", "base.py", "manager.py"}
    assert not [path for path in FILES if path.name in vague]


def test_a_basename_occurs_once_and_packages_are_small():
    named = [path for path in FILES if path.stem not in ("__init__", "__main__")]
    assert not [name for name, count in Counter(path.name for path in named).items() if count > 1]
    for folder, count in Counter(path.parent for path in named).items():
        assert count <= MOST_FILES, f"{folder} has {count} files"
        assert len(folder.relative_to(PACKAGE).parts) <= 2, f"{folder} is more than two levels down"


def test_the_job_store_opens_without_the_result_and_its_metrics():
    """A fifth of the CPU time of `llmb-run jobs`, which prints columns of the store."""
    code = "import sys, llmb.results.job_store; print('llmb.results.result' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
