"""Every command the README prints works as it is printed, in the order it is printed."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def printed_commands() -> list[str]:
    """The lines of fenced blocks that are commands, comments cut off; `make` calls this test, so it is left out."""
    commands, fenced = [], False
    for line in (ROOT / "README.md").read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced and ("llmb-run" in line or line.startswith("common/")):
            commands.append(line.split("  #")[0].strip())
    return commands


def test_the_readme_has_commands():
    assert len(printed_commands()) > 10


@pytest.mark.slow
def test_every_printed_command_works():
    for command in printed_commands():
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), command
