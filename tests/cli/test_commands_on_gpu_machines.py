"""Commands that README, docs and `--help` print work on machines with GPUs, whichever these are."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from fake_gpu import install_fake_gpu

from llmb.cli.llmb_run import parser

ROOT = Path(__file__).parent.parent.parent
RESOLVING = ("submit", "show", "plan", "list")  # commands that need no GPU, with --dry-run
DESK = (*RESOLVING, "predict", "tune", "explain", "exemplar")
NEEDS_MORE = re.compile(r"--measure|after `llmb-run probe`|exemplar (?!.*--dry-run)|explain [^-]")  # a GPU, or a run
LINE = re.compile(r"^ *(?:[A-Z_]+=\S+ )*llmb-run (?:\w+).*")


def printed_commands(texts: Iterable[str], names: tuple[str, ...]) -> list[str]:
    """Return the lines of texts that are commands of these names, without their comments."""
    lines = [line for text in texts for line in text.splitlines() if not NEEDS_MORE.search(line)]
    stripped = [line.split("  #")[0].strip() for line in lines]
    commands = [line for line in stripped if LINE.match(line) and "..." not in line and not line.endswith("\\")]
    return [line for line in commands if line.split("llmb-run ")[1].split()[0] in names]


def helps() -> Iterator[str]:
    """Yield the examples in the help of each command; those of `single` are those of `submit`."""
    actions = parser()._subparsers._group_actions  # type: ignore[union-attr]
    yield from (command.epilog or "" for name, command in actions[0].choices.items() if name != "single")


def texts(*paths: Path) -> list[str]:
    return [path.read_text() for path in paths]


README = printed_commands(texts(ROOT / "README.md"), RESOLVING)
PAGES = texts(*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("llmb/recipes/*/README.md")), ROOT / "README.md")
DOCUMENTS = [line for line in dict.fromkeys(printed_commands([*PAGES, *helps()], DESK)) if line not in README]


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
    for name in DESK:
        assert any(f"llmb-run {name} " in command for command in [*README, *DOCUMENTS]), name
    assert len(DOCUMENTS) > 80


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"])
@pytest.mark.parametrize("command", README)
def test_readme_commands_resolve_on_any_machine(llmb_run, monkeypatch, tmp_path, gpu, command):
    install_fake_gpu(monkeypatch, tmp_path / "bin", gpu)
    monkeypatch.chdir(tmp_path)
    code, out, err = llmb_run(*as_dry_run(command, monkeypatch))
    assert (code, err) == (0, ""), command
    assert out


def marks(command: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a command: plans of full size take seconds, so that of the smallest model runs by day."""
    if "outofcore" not in command:
        return []
    return [pytest.mark.slow if "--proxy" in command or "-s 3b" in command else pytest.mark.nightly]


QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.mark.parametrize("command", [pytest.param(c, marks=marks(c)) for c in DOCUMENTS])
def test_documented_commands_resolve_on_an_h100(llmb_run, monkeypatch, tmp_path, command):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA H100 80GB HBM3")
    (tmp_path / "Qwen3-8B").mkdir()
    for path in (tmp_path / "config.json", tmp_path / "Qwen3-8B" / "config.json"):
        path.write_text(json.dumps(QWEN3_8B))
    (tmp_path / "faults.yaml").write_text("- {kind: rank_killed, step: 5, rank: 1}\n")
    (tmp_path / "runs.csv").write_text(
        "model,size,gpu,dtype,gpus,seqlen,gbs,mbs,tp,pp\nllama3.1,8b,h100,bf16,8,8192,128,1,1,1\n"
    )
    (tmp_path / "loads.csv").write_text(
        "model,backend,system,precision,isl,osl,concurrency,tp\nllama3.1-8b,vllm,h200_sxm,fp8,1024,128,8,1\n"
    )
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    code, out, err = llmb_run(*as_dry_run(command, monkeypatch))
    assert code == 0, f"{command}\n{err}"
    assert out
