"""Provenance: the commit of llmb's checkout, versions and device name."""

import subprocess
from pathlib import Path

import pytest
import torch

import llmb
from llmb.formats.device_facts import recorded_facts
from llmb.runtime.provenance import commit, device_name, run_started, versions
from llmb.runtime.rank_info import RankInfo


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a checkout from which llmb appears to be imported."""
    package = tmp_path / "checkout" / "llmb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(llmb, "__file__", str(package / "__init__.py"))
    return package


def test_commit_of_a_checkout(package: Path) -> None:
    assert commit() is None
    git(package.parent, "init")
    assert commit() is None  # nothing is committed yet
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-m", "first")
    git(package.parent, "tag", "v1")
    head = git(package.parent, "rev-parse", "HEAD")
    assert commit() == head
    (package / "__init__.py").write_text("changed = True\n")
    assert commit() == f"{head}-dirty"


def test_enclosing_checkout_is_ignored(package: Path) -> None:
    outer = package.parent.parent
    git(outer, "init")
    git(outer, "add", ".")
    git(outer, "commit", "-m", "theirs")
    assert commit() is None


def test_versions_and_device_name() -> None:
    assert versions().keys() >= {"llmb", "python", "torch"}
    assert all(isinstance(version, str) for version in versions().values())
    assert device_name(torch.device("cpu"))


def test_first_event_records_the_device() -> None:
    event = run_started(RankInfo(1, 2, torch.device("cpu")))
    assert (event.rank, event.world_size, event.commit) == (1, 2, None)
    assert recorded_facts(event.device).power_limit_w is None  # of a CPU only the governor is known
