"""A fake nvidia-smi, which prints what the real one prints on a machine with GPUs of a given name."""

import os
from pathlib import Path

import pytest

SCRIPT = """#!/bin/sh
case "$*" in
    *--query-gpu=name*--format=csv,noheader) {names} ;;
    *--query-gpu=memory.total*--format=csv,noheader,nounits) {memory} ;;
    *) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""


def install_fake_gpu(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, mib: int | str = 81559, count: int = 1
) -> None:
    """Put a fake nvidia-smi first on the PATH."""
    folder.mkdir(exist_ok=True)
    script = folder / "nvidia-smi"
    lines = {"names": f"echo '{name}'", "memory": f"echo '{mib}'"}
    script.write_text(SCRIPT.format(**{key: "; ".join([line] * count) for key, line in lines.items()}))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
