"""Expanding a command line to the list of runs: targets, lists, bounds, discovery."""

import pytest

from llmb.config.run_list import RunSelection, tasks_for
from llmb.errors import ConfigError


def runs(tasks):
    return [(t.workload, t.request.size, t.request.dtype, t.request.gpus) for t in tasks]


def test_lists_multiply_and_the_largest_scale_comes_first(recipes):
    selection = RunSelection(
        targets=("pretrain_grok1",), size="314b", dtypes=("fp8", "bf16"), scales=(128, 256), gpu="gb200"
    )
    assert runs(tasks_for(selection, recipes)) == [
        ("pretrain_grok1", "314b", "fp8", 256),
        ("pretrain_grok1", "314b", "bf16", 256),
        ("pretrain_grok1", "314b", "fp8", 128),
        ("pretrain_grok1", "314b", "bf16", 128),
    ]


def test_target_list_takes_sizes_from_suffixes(recipes):
    selection = RunSelection(targets=("pretrain_llama3.1_70b", "pretrain_nemotronh"), scales=(64,), gpu="h100")
    assert {t[:2] for t in runs(tasks_for(selection, recipes))} == {
        ("pretrain_llama3.1", "70b"),
        ("pretrain_nemotronh", "56b"),
    }


@pytest.mark.parametrize(
    ("bounds", "scales"),
    [
        ({}, [512, 256, 128, 64, 32, 16, 8][2:]),
        ({"max_scale": 32}, [32, 16, 8]),
        ({"max_scale": 600}, [512, 256, 128, 64, 32, 16, 8]),
        ({"max_scale": 600, "exact_scales": True}, [128, 64, 32, 16, 8]),
        ({"min_scale": True}, [8]),
    ],
)
def test_bounds_limit_and_continue_the_listed_scales(recipes, bounds, scales):
    selection = RunSelection(targets=("pretrain_llama3.1_8b",), dtypes=("fp8",), gpu="b200", **bounds)
    assert [t.request.gpus for t in tasks_for(selection, recipes)] == scales


def test_discovery_takes_training_workloads_only(recipes):
    workloads = {t.workload for t in tasks_for(RunSelection(min_scale=True, gpu="gb200"), recipes)}
    assert workloads == {"pretrain_llama3.1", "pretrain_grok1"}


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (RunSelection(targets=("pretrain_lama3.1",)), "did you mean pretrain_llama3.1"),
        (RunSelection(targets=("pretrain_llama3.1_9b",)), "unknown size"),
        (RunSelection(targets=("pretrain_llama3.1_8b",), size="70b"), "give one of them"),
        (RunSelection(targets=("pretrain_llama3.1",), scales=(8,), max_scale=8), "--scale excludes"),
        (RunSelection(targets=("pretrain_llama3.1",), force=True), "--force takes exactly one run"),
        (RunSelection(targets=("pretrain_llama3.1",), repeats=0), "at least 1"),
        (
            RunSelection(targets=("pretrain_llama3.1_405b",), gpu="h100", max_scale=256),
            "--max-scale 256 is below the scales of pretrain_llama3.1 405b h100: 1024$",
        ),
        (
            RunSelection(targets=("pretrain_grok1",), gpu="gb200", dtypes=("bf16",), max_scale=64),
            "--max-scale 64 is below the scales of pretrain_grok1 gb200 bf16: 128, 256, 512$",
        ),
        (
            RunSelection(targets=("pretrain_llama3.1",), size="8b", gpu="h100", dtypes=("bf16",), min_scale=True),
            "unknown dtype of pretrain_llama3.1 8b h100 'bf16'; choices are: fp8$",
        ),
        (
            RunSelection(targets=("pretrain_llama3.1",), size="8b", gpu="h100", dtypes=("fp8", "bf16"), max_scale=16),
            "unknown dtype of pretrain_llama3.1 8b h100 'bf16'",
        ),
        (
            RunSelection(targets=("pretrain_llama3.1_1b",), gpu="h100", min_scale=True),
            "unknown GPU type of pretrain_llama3.1 1b 'h100'",
        ),
    ],
)
def test_invalid_selection_is_named(recipes, selection, message):
    with pytest.raises(ConfigError, match=message):
        tasks_for(selection, recipes)


@pytest.mark.parametrize(
    "selection",
    [
        RunSelection(targets=("Pretrain_Llama3.1",), size="8B", dtypes=("FP8",), scales=(8,)),
        RunSelection(targets=("PRETRAIN_LLAMA3.1_8B",), dtypes=("Fp8",), scales=(8,)),
        RunSelection(targets=("pretrain_llama3.1_8b",), size="8B", dtypes=("fp8",), scales=(8,)),
    ],
)
def test_names_match_in_any_case(recipes, selection):
    assert runs(tasks_for(selection, recipes)) == [("pretrain_llama3.1", "8b", "fp8", 8)]


def test_gpu_that_is_not_in_the_table_has_the_scales_of_the_default_gpu(recipes):
    selection = RunSelection(targets=("pretrain_llama3.1_405b",), gpu="l40", gpu_memory_bytes=48 << 30)
    tasks = tasks_for(selection, recipes)
    assert {t.request.gpus for t in tasks} == {128, 256, 512}
    assert {(t.request.gpu, t.request.gpu_memory_bytes) for t in tasks} == {("l40", 48 << 30)}
