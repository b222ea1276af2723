"""Commands that README and docs print resolve on machines with GPUs, whichever these are."""

import json
import re
import shlex
from pathlib import Path

import pytest
from fake_gpu import install_fake_gpu

ROOT = Path(__file__).parent.parent.parent
RESOLVING = ("submit", "show", "plan", "list")  # commands that need no GPU, with --dry-run
LINE = re.compile(r"^ *(?:[A-Z_]+=\S+ )*llmb-run (?:\w+).*")


def printed_commands(*documents: Path) -> list[str]:
    """Return the commands of fenced blocks that resolve runs, without their comments."""
    lines = [line.split("  #")[0].strip() for path in documents for line in path.read_text().splitlines()]
    commands = [line for line in lines if LINE.match(line) and "..." not in line and not line.endswith("\\")]
    return [line for line in commands if line.split("llmb-run ")[1].split()[0] in RESOLVING]


README = printed_commands(ROOT / "README.md")
DOCUMENTS = printed_commands(*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("llmb/recipes/*/README.md")))


def as_dry_run(command: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a printed command that runs nothing; its variables are set."""
    words = shlex.split(command.replace("~/", "/"))
    start = words.index("llmb-run")
    for name, value in (word.split("=", 1) for word in words[:start]):
        monkeypatch.setenv(name, value)
    arguments = [word for word in words[start + 1 :] if word != "--memory"]  # the dry run of a rank takes minutes
    return [*arguments, *(["--dry-run"] if arguments[0] == "submit" and "--dry-run" not in arguments else [])]


def test_documents_have_commands():
    assert len(README) > 8
    assert len(DOCUMENTS) > 25


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"])
@pytest.mark.parametrize("command", README)
def test_readme_commands_resolve_on_any_machine(llmb_run, monkeypatch, tmp_path, gpu, command):
    install_fake_gpu(monkeypatch, tmp_path / "bin", gpu)
    monkeypatch.chdir(tmp_path)
    code, out, err = llmb_run(*as_dry_run(command, monkeypatch))
    assert (code, err) == (0, ""), command
    assert out


def marks(command: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a command: a plan of full size takes seconds; `test_documented_commands.py` has one."""
    if "outofcore" not in command:
        return []
    return [pytest.mark.slow if "--proxy" in command else pytest.mark.nightly]


QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.mark.parametrize("command", [pytest.param(c, marks=marks(c)) for c in dict.fromkeys(DOCUMENTS)])
def test_documented_commands_resolve_on_an_h100(llmb_run, monkeypatch, tmp_path, command):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA H100 80GB HBM3")
    (tmp_path / "Qwen3-8B").mkdir()
    for path in (tmp_path / "config.json", tmp_path / "Qwen3-8B" / "config.json"):
        path.write_text(json.dumps(QWEN3_8B))
    (tmp_path / "faults.yaml").write_text("- {kind: rank_killed, step: 5, rank: 1}\n")
    monkeypatch.chdir(tmp_path)
    code, out, err = llmb_run(*as_dry_run(command, monkeypatch))
    assert code == 0, f"{command}\n{err}"
    assert out
