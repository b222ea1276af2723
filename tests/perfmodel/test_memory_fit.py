"""Every row that recipes list fits; a run that does not is refused with changes that make it fit."""

from dataclasses import replace
from functools import cache

import pytest

from llmb.config.native.departures import departures
from llmb.config.overrides import Setting
from llmb.config.recipe import Row, expand_gpus, load_all, selector_values, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Machine, RunConfig
from llmb.perfmodel import memory_fit, training_memory
from llmb.perfmodel.hardware import GIB, gpu, memory_bytes
from llmb.perfmodel.memory_estimate import memory_estimate

RECIPES = load_all([shipped()])


@cache
def listed_runs() -> list[RunConfig]:
    """Every row at its smallest scale, where a rank needs most, for each of its GPUs and dtypes; none out of core."""
    requests = [
        (recipe, row, RunRequest(size=row["size"], dtype=dtype, gpus=expand_gpus(row["gpus"])[0], gpu=gpu))
        for recipe in RECIPES.values()
        if recipe.kind != "outofcore"
        for row in recipe.rows
        for gpu in selector_values(row, "gpu")
        for dtype in selector_values(row, "dtype")
    ]
    return [resolve(recipe, replace(request, settings=selectors(row))) for recipe, row, request in requests]


def selectors(row: Row) -> tuple[Setting, ...]:
    names = [name for name in ("mode", "use_case") if name in row]
    return tuple(Setting(field=name, value=selector_values(row, name)[0], source="test") for name in names)


def training(size="405b", gpus=128, gpu="gb200", dtype="fp8", workload="pretrain_llama3.1", **settings):
    changes = tuple(Setting(field=name, value=str(value), source="--set") for name, value in settings.items())
    return resolve(RECIPES[workload], RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, settings=changes))


@pytest.mark.slow
def test_every_listed_row_fits():
    assert len(listed_runs()) > 150
    assert {config.name: line for config in listed_runs() if (line := memory_fit.misfit(config)) is not None} == {}


def test_budgets_of_every_out_of_core_row_are_within_its_gpu():
    """A plan, which takes seconds to find, stays within its budgets."""
    rows = [row for recipe in RECIPES.values() if recipe.kind == "outofcore" for row in recipe.rows]
    assert all(
        row["device_gib"] * GIB <= (gpu(name).memory_bytes or 0) for row in rows for name in selector_values(row, "gpu")
    )


@pytest.mark.slow
def test_rows_published_with_smaller_gradients_recompute_some_layers_and_say_so():
    """Gradients are fp32 here: Nemotron-H on 32 H100 needs 80 of 79 GiB otherwise."""
    adapted = {
        (config.target, config.size, config.machine.gpu): line
        for config in listed_runs()
        for line in departures(config)
        if line.startswith("recompute_layers=")
    }
    assert set(adapted) == {
        ("pretrain_nemotronh", "56b", "h100"),
        ("pretrain_grok1", "314b", "h100"),
        ("pretrain_grok1", "314b", "gb200"),
    }
    assert all("beside its master weights, gradients and moments" in line for line in adapted.values())
    changed = training("56b", 32, "h100", workload="pretrain_nemotronh", recompute_layers=0)
    assert departures(changed) == []  # the user's setting stays, and is refused
    assert "--set recompute_layers=" in (memory_fit.misfit(changed) or "")


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"mbs": 64, "gbs": 4096}, "--set mbs=1 fits"),
        ({"offload_layers": 20}, "--set recompute_layers="),
        ({"offload_layers": 0, "fsdp": False}, "no setting of this run would make it fit"),
    ],
)
def test_remedies_of_a_training_run(settings, option):
    assert option in (memory_fit.misfit(training(**settings)) or "")


def test_each_remedy_fits():
    config = training(offload_layers=20)
    limit = memory_fit.USABLE_FRACTION * (memory_bytes(config.machine) or 0)
    changes = list(memory_fit.remedies(config, limit))
    (layers,) = (int(c.removesuffix(" fits").rpartition("=")[2]) for c in changes if "recompute" in c)
    enough, too_few = (
        replace(config, workload=replace(config.workload, recompute_layers=n)) for n in (layers, layers - 1)
    )
    assert memory_estimate(enough).total <= limit < memory_estimate(too_few).total


def test_more_gpus_are_proposed_where_replicas_shard_the_optimizer():
    config = training("56b", 32, "h100", workload="pretrain_nemotronh", recompute_layers=0)
    assert "--scale 64 fits" in (memory_fit.misfit(config) or "")


def test_estimates_of_other_engines_are_refused_only_far_beyond():
    listed = training("70b", 64, engine="megatron_bridge")
    assert memory_estimate(listed).total > (memory_bytes(listed.machine) or 0)  # it is known to have run
    assert memory_fit.misfit(listed) is None
    assert memory_fit.misfit(training("70b", 64, engine="megatron_bridge", mbs=4, gbs=256)) is not None


def test_out_of_core_plan_is_compared_with_the_gpu():
    proxy = resolve(RECIPES["outofcore_llama3"], RunRequest(size="3b", dtype="bf16", gpus=1, proxy="small"))
    line = memory_fit.misfit(
        replace(proxy, machine=Machine(gpu="rtx-4080", gpus=1, gpus_per_node=8, gpu_memory_bytes=1 << 20))
    )
    assert (line or "").startswith("the plan uses ")
    assert (line or "").endswith("an rtx-4080 has 0.0 GiB; lower --device-gb")
    assert memory_fit.misfit(replace(proxy, machine=Machine(gpu="h100", gpus=1, gpus_per_node=8))) is None


def test_a_long_step_has_the_peak_of_its_first_rounds(monkeypatch):
    """Its steady rounds are alike: the estimate of a step of any length takes milliseconds."""
    rows = [training(), training("70b", 64, "h100"), training(gpu="h100", gpus=1024), training(gpu="b200")]
    short = [training_memory.peak_memory(config) for config in rows]
    monkeypatch.setattr(training_memory, "SIMULATED_ROUNDS", 1000)
    assert [training_memory.peak_memory(config) for config in rows] == short


def test_host_memory_of_ranks():
    config = resolve(RECIPES["pretrain_llama3.1"], RunRequest(size="8b", dtype="bf16", gpus=4, proxy="small"))
    each = memory_fit.CPU_RANK_BYTES + memory_estimate(config).total
    assert memory_fit.host_bytes(config, 4) == 4 * each + memory_fit.LAUNCHER_BYTES
    offloading = training()
    assert memory_fit.host_bytes(offloading, 4) == 4 * (GIB + memory_estimate(offloading).host) + 0.2 * GIB
