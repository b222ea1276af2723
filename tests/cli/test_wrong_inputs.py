"""Inputs that once ended in an internal error, a hang or silence: each is refused in one line that names it."""

import os

import pytest

from llmb.cli.llmb_run import main
from llmb.config.bulk_file import read_bulk
from llmb.config.recipe import load, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.run_list import RunSelection
from llmb.errors import ConfigError, LlmbError
from llmb.formats.weight_folder import check_folder
from llmb.launch.run_folder import store_path

RECIPE = (shipped() / "pretrain_llama3.1" / "recipe.yaml").read_text()
HUNDRED = str(list(range(100)))
PROXY = "{size: 8b, dtype: [bf16, fp32, fp8], gpus: 1,"


@pytest.fixture(autouse=True)
def install(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("submit -w pretrain_llama3.1 -s 8b --scale ² --proxy", "--scale: expected GPU counts"),
        ("timing . --window ²-3", "--window: expected FIRST-LAST"),
        (f"timing . --window 1-{'9' * 5000}", "--window: expected FIRST-LAST"),
        (f"jobs -n {10**30}", "no runs yet"),
    ],
)
def test_command_line(command, message, capsys):
    main(command.split())
    printed = capsys.readouterr()
    assert message in printed.err + printed.out
    assert "internal error" not in printed.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pretrain_llama3.1_8b: {dtypes: {}}", "dtypes: expected text or"),
        ("pretrain_llama3.1_8b: {repeats: 99999999}", "99,999,999 runs are more than"),
        (
            "pretrain_llama3.1_8b: {scales: 1, tasks: [{overrides: {params: {tp: L, pp: L, cp: L, mbs: L}}}]}".replace(
                "L", HUNDRED
            ),
            "sweeps 100,000,000 runs; at most 10,000",
        ),
        (
            "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]),
            "aliases",
        ),
        ("a: &a [*a]", "aliases expand"),
        (
            "\n".join(
                ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))]
            ),
            "merge keys expand to more than 1,000,000",
        ),
        (f"pretrain_llama3.1_8b: {{scales: 0x{'f' * 5000}}}", "a whole number of more than 1024 bits"),
        (f"pretrain_llama3.1_8b: {{scales: '{'1' * 10**6}'}}", "expected .*"),
        ("pretrain_llama3.1_8b: {scales: !!bool 3}", "a value is not of the type that its tag names"),
        ('pretrain_llama3.1_8b: {scales: !!int ""}', "a value is not of the type that its tag names"),
        ("[" * 100_000, "nested more than 1000 levels deep"),
        ("{a: " * 100_000, "nested more than 1000 levels deep"),
        ("- " * 50_000, "nested more than 1000 levels deep"),
        ("".join(f"{' ' * n}a:\n" for n in range(1200)), "nested more than 1000 levels deep"),
    ],
)
def test_bulk_file(text, message, tmp_path, recipes):
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_bulk(path, recipes, RunSelection())


@pytest.mark.parametrize(
    ("cell", "replaced", "message"),
    [
        (PROXY, PROXY + " tpp: 4,", "unknown cell in a row of pretrain_llama3.1: 'tpp'"),
        (PROXY, PROXY.replace("gpus: 1", "gpus: 0"), "gpus: expected a number above 0"),
        (PROXY, PROXY.replace("gpus: 1", "gpus: ²-8"), "gpus: expected a number above 0"),
        (PROXY, PROXY + " pp: -3,", "pp: -3 is out of range"),
        ("dtype: [bf16, fp32, fp8]", "dtype: [{}]", "dtype: expected text or a list of texts"),
        ("vocab: 128256", "vocab: 0", "vocab: 0 is out of range"),
    ],
)
def test_recipe(cell, replaced, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace(cell, replaced))
    with pytest.raises(LlmbError, match=message):
        resolve(load(path), RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))


@pytest.mark.parametrize("command", ["-v jobs show X", "jobs -v show X", "jobs show X -v"])
def test_verbose_is_accepted_before_and_after_the_command(command):
    with pytest.raises(ConfigError, match="no job 'X'"):
        main(command.split())


def test_bad_user_recipe_blocks_only_itself(install, capsys):
    for name, text in (("mine", RECIPE.replace("kind: training", "kind: cooking")), ("pretrain_grok1", "[")):
        (install / "recipes" / name).mkdir(parents=True)
        (install / "recipes" / name / "recipe.yaml").write_text(text)
    assert main(["list"]) == 0
    printed = capsys.readouterr()
    assert "pretrain_llama3.1" in printed.out
    assert "pretrain_grok1" not in printed.out  # not the shipped one that it was written to replace
    assert printed.err.count("ERROR: ") == 2
    assert all(str(install / "recipes" / name / "recipe.yaml") in printed.err for name in ("mine", "pretrain_grok1"))


def test_user_recipe_that_is_a_fifo_blocks_nobody(install, capsys):
    folder = install / "recipes" / "pretrain_mine"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "recipe.yaml")
    assert main(["list"]) == 0
    assert "pretrain_mine/recipe.yaml: it is not a regular file; this recipe is left out" in capsys.readouterr().err


def test_store_damaged_behind_its_first_page_says_how_to_go_on(install, capsys, recipes):
    from llmb.cli.jobs.jobs import open_store

    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    with open_store() as store:
        for _ in range(30):
            store.add(config, install, status="ok")
    content = bytearray(store_path(install).read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    store_path(install).write_bytes(content)
    assert main(["jobs"]) == 2
    assert "move it away and run: llmb-run jobs rebuild" in capsys.readouterr().err


def test_weights_with_a_fifo_and_an_absurd_series(tmp_path):
    os.mkfifo(tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model-1-of-99999999999.safetensors").write_bytes(b"")
    report = check_folder(tmp_path)
    assert report.has("unreadable", file="model-00001-of-00002.safetensors")
    assert report.has("missing", file="model-00002-of-00002.safetensors")
