"""`llmb-run show` prints the values that the engine will use, never a bare dash, and what departs from the recipe."""

from dataclasses import replace

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Override, RunConfig
from llmb.report.config_summary import describe
from llmb.report.predictions.dry_table import dry_table
from llmb.report.setting_text import override_text, precision_text, settings
from llmb.report.summary import summary
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


def test_fp8_recipe_is_shown_as_used(show_settings):
    delayed = "tensorwise_delayed: one scale per tensor, by the amax of earlier steps"
    assert show_settings("pretrain_llama3.1", "8b", "fp8")[1]["fp8_recipe"] == delayed
    assert show_settings("pretrain_llama3.1", "8b", "fp8", 8, "h100")[1]["fp8_recipe"] == delayed
    assert show_settings("pretrain_llama3.1", "8b", "bf16")[1]["fp8_recipe"] == "none: no fp8 GEMMs"
    assert show_settings("inference_llama3.1", "8b", "fp8")[1]["fp8_recipe"].startswith(
        "channelwise: one scale per output channel"
    )


@pytest.mark.parametrize(
    ("run", "changes", "text"),
    [
        (("pretrain_llama3.1", "1b", "fp8"), {},
         "fp8 tensorwise delayed, fp32-equivalent master weights, gradients fp32, moments fp32"),
        (("pretrain_llama3.1", "8b", "fp8", 64, "h100"), {},
         "fp8 tensorwise delayed, fp32-equivalent master weights, gradients fp32, moments fp32"),
        (("pretrain_llama3.1", "8b", "bf16", 8), {"reduce_dtype": "bf16"},
         "bf16, fp32-equivalent master weights, gradients bf16, moments bf16, gradients reduced in bf16"),
        (("pretrain_llama3.1", "1b", "fp8"),
         {"fp8_recipe": "tensorwise_current", "fp8_fast_accum": "true", "master_weights": "bf16"},
         "fp8 tensorwise current, fast accumulation in backward, bf16 master weights with stochastic rounding, "
         "gradients fp32, moments fp32"),
        (("pretrain_llama3.1", "8b", "fp8"), {"fp8_recipe": "blockwise"},
         "fp8 blockwise, fp32-equivalent master weights, gradients bf16, moments bf16"),
        (("pretrain_grok1", "314b", "fp8", 128, "gb200"), {},
         "fp8 tensorwise delayed, experts bf16, fp32-equivalent master weights, gradients fp32, moments fp32"),
        (("inference_llama3.1", "8b", "fp8"), {}, "fp8 channelwise, KV cache fp8"),
    ],
)  # fmt: skip
def test_precision_is_one_line_of_show_and_of_the_result(show_settings, run, changes, text):
    config, values = show_settings(*run, **changes)
    assert values["precision"] == text
    assert summary(derive(config, [])).splitlines()[1] == f"precision: {text}"


@pytest.mark.parametrize(
    ("update", "weights"),
    [
        ("master", "fp32-equivalent master weights"),
        ("stochastic", "bf16 weights with stochastic rounding"),
        ("nearest", "bf16 weights rounded to nearest"),
    ],
)
def test_precision_of_out_of_core_training_names_its_update(update, weights):
    formats = {"dtype": "fp8", "fp8_recipe": "tensorwise_delayed", "update": update}
    assert precision_text(formats) == f"fp8 tensorwise delayed, {weights}"
    assert precision_text({"dtype": "fp32", "update": update}) == "fp32, fp32 weights"


def test_precision_of_another_engine_is_not_guessed(show_settings):
    config, values = show_settings("pretrain_llama3.1", "8b", "fp8", 16, "gb200", engine="megatron_bridge")
    assert "precision" not in values
    assert derive(config, []).number_formats == {"dtype": "fp8"}


def test_gradients_that_are_rounded_once_are_not_called_fp32(show_settings):
    one_batch = {"mbs": "4", "gbs": "4"}
    assert show_settings("pretrain_llama3.1", "1b", "bf16", **one_batch)[1]["gradients"].startswith(
        "bf16: one micro-batch"
    )
    assert show_settings("pretrain_llama3.1", "1b", "bf16")[1]["gradients"] == "fp32"
    assert show_settings("pretrain_llama3.1", "1b", "bf16")[1]["master_weights"].startswith("fp32: a bf16 half")


def test_departure_is_one_line_of_show_and_dry_run_and_is_in_the_result(show_settings):
    config, _ = show_settings("pretrain_llama3.1", "8b", "fp8", 16, "gb200", pp="2")
    line = "cuda_graphs=false instead of the recipe's true (native engine: the pipeline schedule launches from "
    assert describe(config, "python").splitlines()[1].startswith(f"departs from the recipe: {line}")
    assert describe(config, "python").count("cuda_graphs") == 2  # the setting and the departure
    dry = dry_table([(config, 1), (replace(config, name="other"), 1)])
    assert dry.splitlines()[-1].startswith(f"departs from the recipe: {config.name} and 1 more: {line}")
    assert "instead of True" not in dry


@pytest.mark.parametrize(
    ("field", "value", "replaced", "text"),
    [
        ("profile", True, None, "profile = true"),
        ("streaming", False, True, "streaming = false instead of true"),
        ("host_gib", 60.0, 178, "host_gib = 60 instead of 178"),
        ("window", [3, 5], (11, 44), "window = 3-5 instead of 11-44"),
        ("profile_ranks", [0, 8], None, "profile_ranks = 0,8"),
        (
            "slurm_params",
            ["constraint=gpu&memory", "exclusive"],
            None,
            "slurm_params = constraint=gpu&memory, exclusive",
        ),
    ],
)
def test_a_changed_setting_is_shown_as_it_is_typed(field, value, replaced, text):
    assert override_text(Override(field=field, value=value, replaced=replaced, source="--set")) == text


def test_number_formats_are_in_the_result(show_settings):
    def formats(config: RunConfig) -> dict:
        return derive(config, []).number_formats

    assert formats(show_settings("pretrain_llama3.1", "8b", "fp8")[0]) == {
        "dtype": "fp8", "fp8_recipe": "tensorwise_delayed", "fp8_fast_accum": False, "master_weights": "fp32",
        "gradients": "bf16", "reduce_dtype": "fp32", "moments": "bf16",
    }  # fmt: skip
    one_batch = show_settings("pretrain_llama3.1", "1b", "bf16", mbs="4", gbs="4")[0]
    assert formats(one_batch)["gradients"] == "bf16"
    assert formats(show_settings("inference_llama3.1", "8b", "bf16")[0]) == {"dtype": "bf16", "kv_dtype": "bf16"}
    overrides = derive(show_settings("pretrain_llama3.1", "8b", "fp8", 16, "gb200", pp="2")[0], []).overrides
    assert ("cuda_graphs", False, True) in [(o["field"], o["value"], o["replaced"]) for o in overrides]
