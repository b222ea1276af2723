"""The walks of docs/architecture.md are the ones that run: each file leads to the next by its imports."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from source_imports import imported_names

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
MOST_FILES = 9  # of a walk
STEP = re.compile(r"^\d+\. `(llmb/\S+\.py)`(.*)$", re.MULTILINE)
STARTED = re.compile(r"`python -m (llmb\.\w+)`")  # a process instead of an import
WALKS = {title: STEP.findall(text) for title, text in re.findall(r"^### (.+?): (.*?)(?=^##|\Z)", DOCUMENT, re.M | re.S)}


def imported_files(path: Path) -> set[Path]:
    """Files of the package that a file imports, wherever the import stands."""
    files = {ROOT / (name.replace(".", "/") + ".py") for name in imported_names(path) if name.startswith("llmb")}
    return {file for file in files if file.exists()}


def test_there_are_three_walks():
    assert len(WALKS) == 3
    assert all(1 < len(steps) <= MOST_FILES for steps in WALKS.values())


@pytest.mark.parametrize("title", WALKS)
def test_a_file_before_leads_to_each_file(title):
    """By an import, with at most one file between, or by starting a process."""
    steps, reached = WALKS[title], set()
    for (name, text), (following, _) in pairwise(steps):
        path = ROOT / name
        if started := STARTED.search(text):
            module = started[1]
            assert f'"{module}"' in (ROOT / "llmb/launch/command.py").read_text(), f"{name} does not start {module}"
            path, reached = ROOT / module.replace(".", "/") / "__main__.py", set()
        near = imported_files(path)
        reached |= near | {far for file in near for far in imported_files(file)}
        assert ROOT / following in reached, f"nothing before {following} imports it"


def test_every_named_file_exists():
    for name in re.findall(r"`(llmb/[\w/]+\.py)`", DOCUMENT):
        assert (ROOT / name).exists(), name
