"""From a command line to the list of runs: targets, lists, bounds, discovery."""

import pytest

from llmb.config.run_list import Wanted, tasks_for
from llmb.errors import ConfigError


def spelled(tasks):
    return [(t.workload, t.request.size, t.request.dtype, t.request.gpus) for t in tasks]


def test_lists_multiply_and_the_largest_scale_comes_first(recipes):
    wanted = Wanted(targets=("pretrain_grok1",), size="314b", dtypes=("fp8", "bf16"), scales=(128, 256), gpu="gb200")
    assert spelled(tasks_for(wanted, recipes)) == [
        ("pretrain_grok1", "314b", "fp8", 256),
        ("pretrain_grok1", "314b", "bf16", 256),
        ("pretrain_grok1", "314b", "fp8", 128),
        ("pretrain_grok1", "314b", "bf16", 128),
    ]


def test_a_target_list_takes_sizes_from_suffixes(recipes):
    wanted = Wanted(targets=("pretrain_llama3.1_70b", "pretrain_nemotronh"), scales=(64,), gpu="h100")
    assert {t[:2] for t in spelled(tasks_for(wanted, recipes))} == {
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
def test_bounds_cut_and_continue_the_listed_scales(recipes, bounds, scales):
    wanted = Wanted(targets=("pretrain_llama3.1_8b",), dtypes=("fp8",), gpu="b200", **bounds)
    assert [t.request.gpus for t in tasks_for(wanted, recipes)] == scales


def test_discovery_takes_training_workloads_only(recipes):
    found = {t.workload for t in tasks_for(Wanted(min_scale=True, gpu="gb200"), recipes)}
    assert found == {"pretrain_llama3.1", "pretrain_grok1"}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted(targets=("pretrain_lama3.1",)), "did you mean pretrain_llama3.1"),
        (Wanted(targets=("pretrain_llama3.1_9b",)), "unknown size"),
        (Wanted(targets=("pretrain_llama3.1_8b",), size="70b"), "give one of them"),
        (Wanted(targets=("pretrain_llama3.1",), scales=(8,), max_scale=8), "--scale excludes"),
        (Wanted(targets=("pretrain_llama3.1",), force=True), "--force takes exactly one run"),
        (Wanted(targets=("pretrain_llama3.1",), repeats=0), "at least 1"),
    ],
)
def test_a_mistake_is_named(recipes, wanted, said):
    with pytest.raises(ConfigError, match=said):
        tasks_for(wanted, recipes)
