"""Table of `submit --dry-run` on narrow and wide terminals and in a pipe."""

from dataclasses import replace

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.perfmodel.explain.run_prediction import with_prediction
from llmb.report.predictions.dry_table import dry_table
from llmb.report.terminal.folding import fold


@pytest.fixture
def config(recipes):
    request = RunRequest(size="70b", dtype="fp8", gpus=64, gpu="h100")
    return with_prediction(resolve(recipes["pretrain_llama3.1"], request))


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("count", [1, 3])
def test_fits_the_terminal(config, columns, count, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = fold(dry_table([(config, 1)] * count), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert config.name in text
    if count == 3:
        assert text.count("\n#") == (3 if columns == 80 else 2), "a wide terminal has predictions beside the runs"


def test_several_runs_have_their_predictions_as_columns(config, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    unknown = replace(config, predicted=replace(config.predicted, value=None, interval_80=None, note="not known"))
    lines = dry_table([(config, 2), (unknown, 1)]).splitlines()
    assert lines[2].split()[-1] == "name"
    assert lines[4].startswith("1  pretrain_llama3.1  70b")
    assert f"{config.predicted.interval_80[0]:.4g} to {config.predicted.interval_80[1]:.4g}" in lines[4]
    assert "predicted of 1: by constants of engine native" in lines
    assert "predicted of 2: unknown (not known)" in lines
    assert "output tokens/s" not in lines[2], "a column without a value is left out"


def test_runs_of_one_name_are_told_apart_by_number(recipes):
    """A profiled run has the name of the same run without profiling."""
    sources = {"cp": ("2", "runs.yaml"), "profile": ("true", "runs.yaml")}
    configs = []
    for fields in (("cp",), ("cp", "profile")):
        settings = tuple(Setting(field=f, value=sources[f][0], source=sources[f][1]) for f in fields)
        request = RunRequest(size="70b", dtype="fp8", gpus=64, gpu="h100", settings=settings)
        configs.append((resolve(recipes["pretrain_llama3.1"], request), 1))
    assert configs[0][0].name == configs[1][0].name
    lines = dry_table(configs).splitlines()
    assert lines[2].split()[7] == "profile"
    assert [line.split()[7] for line in lines[4:6]] == ["-", "yes"]
    assert "1, 2: cp = 2 instead of 1 (runs.yaml)" in lines
    assert "2: profile = true (runs.yaml)" in lines
