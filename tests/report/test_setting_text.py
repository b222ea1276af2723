"""`llmb-run show` prints the values that the engine will use, never a bare dash, and what departs from the recipe."""

from dataclasses import replace

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Override, RunConfig
from llmb.report.config_summary import describe, dry_table
from llmb.report.setting_text import override_text, settings
from llmb.report.table import render
from llmb.results.derive import derive


@pytest.fixture
def show_settings(recipes):
    """Return a function that resolves a run and returns it with its settings as shown."""

    def show(workload: str, size: str, dtype: str, gpus: int = 1, gpu: str = "h200", **changes) -> tuple:
        pairs = tuple(Setting(field=name, value=value, source="--set") for name, value in changes.items())
        request = RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, settings=pairs)
        config = resolve(recipes[workload], request)
        return config, dict(settings(config))

    return show


RUNS = [
    ("pretrain_llama3.1", "8b", "fp8", 1, "h200"),
    ("pretrain_llama3.1", "8b", "fp8", 16, "gb200"),
    ("pretrain_llama3.1", "8b", "bf16", 1, "h200"),
    ("pretrain_nemotronh", "56b", "fp8", 32, "h100"),
    ("pretrain_grok1", "314b", "fp8", 128, "gb200"),
    ("inference_llama3.1", "8b", "fp8", 1, "h200"),
    ("inference_deepseek-r1", "671b", "nvfp4", 4, "gb200"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[2]}-{run[3]}")
def test_no_setting_is_a_dash_or_empty(show_settings, run):
    _, values = show_settings(*run)
    lines = render(("setting", "value"), list(values.items())).splitlines()
    assert not [line for line in lines if len(line.split()) < 2 or line.split()[1] == "-"]


def test_fp8_scaling_is_shown_as_used(show_settings):
    assert show_settings("pretrain_llama3.1", "8b", "fp8")[1]["fp8_scaling"].startswith("delayed: per tensor")
    assert show_settings("pretrain_llama3.1", "8b", "fp8", 8, "h100")[1]["fp8_scaling"].startswith(
        "current: per tensor"
    )
    assert show_settings("pretrain_llama3.1", "8b", "bf16")[1]["fp8_scaling"] == "none: no fp8 GEMMs"
    assert show_settings("inference_llama3.1", "8b", "fp8")[1]["fp8_scaling"].startswith(
        "channel: one per output channel"
    )


def test_gradients_that_are_rounded_once_are_not_called_fp32(show_settings):
    one_batch = {"mbs": "4", "gbs": "4"}
    assert show_settings("pretrain_llama3.1", "1b", "bf16", **one_batch)[1]["gradients"].startswith(
        "bf16: one micro-batch"
    )
    assert show_settings("pretrain_llama3.1", "1b", "bf16")[1]["gradients"] == "fp32"
    assert show_settings("pretrain_llama3.1", "1b", "bf16")[1]["master_weights"].startswith("fp32: a bf16 half")


def test_departure_is_one_line_of_show_and_dry_run_and_is_in_the_result(show_settings):
    config, _ = show_settings("pretrain_llama3.1", "8b", "fp8", 16, "gb200")
    line = "cuda_graphs=false instead of the recipe's true (native engine: CUDA graphs do not capture collectives, "
    assert describe(config, "python").splitlines()[1].startswith(f"departs from the recipe: {line}")
    assert describe(config, "python").count("cuda_graphs") == 2  # the setting and the departure
    dry = dry_table([(config, 1), (replace(config, name="other"), 1)])
    assert dry.splitlines()[-1].startswith(f"departs from the recipe: {config.name} and 1 more: {line}")
    assert "instead of True" not in dry


@pytest.mark.parametrize(
    ("value", "replaced", "text"),
    [
        (True, None, "f = true"),
        (False, True, "f = false instead of true"),
        (60.0, 178, "f = 60 instead of 178"),
        ([3, 5], (11, 44), "f = 3-5 instead of 11-44"),
        (["constraint=gpu&memory", "exclusive"], None, "f = constraint=gpu&memory, exclusive"),
    ],
)
def test_a_changed_setting_is_shown_as_it_is_typed(value, replaced, text):
    assert override_text(Override(field="f", value=value, replaced=replaced, source="--set")) == text


def test_number_formats_are_in_the_result(show_settings):
    def formats(config: RunConfig) -> dict:
        return derive(config, []).number_formats

    assert formats(show_settings("pretrain_llama3.1", "8b", "fp8")[0]) == {
        "dtype": "fp8", "fp8_scaling": "delayed", "fp8_fast_accum": False, "master_weights": "fp32",
        "gradients": "bf16", "moments": "bf16",
    }  # fmt: skip
    one_batch = show_settings("pretrain_llama3.1", "1b", "bf16", mbs="4", gbs="4")[0]
    assert formats(one_batch)["gradients"] == "bf16"
    assert formats(show_settings("inference_llama3.1", "8b", "bf16")[0]) == {"dtype": "bf16", "kv_dtype": "bf16"}
    overrides = derive(show_settings("pretrain_llama3.1", "8b", "fp8", 16, "gb200")[0], []).overrides
    assert ("cuda_graphs", False, True) in [(o["field"], o["value"], o["replaced"]) for o in overrides]
