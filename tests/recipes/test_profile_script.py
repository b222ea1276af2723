"""do_transformer_profile.sh takes the four arguments of the published script, and rejects invalid ones."""

import os
import subprocess
from pathlib import Path

import pytest

from llmb.config.recipe import shipped

SCRIPT = shipped() / "outofcore_llama3" / "do_transformer_profile.sh"
IN_BENCH = Path(__file__).parents[2] / "bench" / SCRIPT.name


@pytest.fixture
def profile(tmp_path):
    """Runs a script with an llmb-run that prints its arguments."""
    fake_command = tmp_path / "bin" / "llmb-run"
    fake_command.parent.mkdir()
    fake_command.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    fake_command.chmod(0o755)

    def run(*arguments, script=SCRIPT):
        environ = {"PATH": f"{fake_command.parent}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run([script, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("script", [SCRIPT, IN_BENCH])
def test_published_command_line(profile, script):
    done = profile("178", "78", "65536", "8", script=script)
    options = "-s 8b --dtype bf16 --scale 1 --host-gb 178 --device-gb 78 --seqlen 65536 -p"
    assert done.stdout.split() == ["submit", "-w", "outofcore_llama3", *options.split()]


@pytest.mark.parametrize("model", [1, 3, 8, 15, 32, 70])
def test_every_model_argument_has_a_size(profile, recipes, model):
    done = profile("1", "2", "3", str(model), "--proxy", "--set", "a b=*")
    assert f"{model}b" in recipes["outofcore_llama3"].models
    words = done.stdout.splitlines()
    assert words[words.index("-s") + 1] == f"{model}b"
    assert words[-3:] == ["--proxy", "--set", "a b=*"]


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "0 of 4 arguments"), (("1", "2", "3"), "3 of 4"), (("1", "2", "3", "9"), "'9'")]
)
def test_invalid_arguments_give_a_one_line_error(profile, arguments, message):
    done = profile(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "MODEL is one of 1, 3, 8, 15, 32, 70" in done.stderr
