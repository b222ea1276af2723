"""A rank of a real run, built without its hardware, does and holds what the closed forms say."""

from dataclasses import replace

import pytest

from llmb.config.overrides import Setting
from llmb.config.recipe import expand_gpus, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.config.spec import RunConfig
from llmb.launch.dry_run_process import rehearse
from llmb.perfmodel.communication import step_traffic
from llmb.perfmodel.dry_run_summary import Rehearsal
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.shards import rank_flops, rank_parameters

CLOSE = 0.02
SMALL = 2**20  # bytes a call: exchanges of counts and single numbers are left out of the closed form
RECIPES = {name: recipe for name, recipe in load_all([shipped()]).items() if recipe.kind == "training"}


def row(workload: str, size: str, dtype: str, gpus: int, gpu: str) -> RunConfig:
    return resolve(RECIPES[workload], Request(size=size, dtype=dtype, gpus=gpus, gpu=gpu))


def every_row() -> list[RunConfig]:
    """At the smallest and largest scale of each."""
    found = []
    for workload, recipe in RECIPES.items():
        for one in recipe.rows:
            scales = expand_gpus(one["gpus"])
            for dtype in one["dtype"] if isinstance(one["dtype"], list) else [one["dtype"]]:
                for gpus in dict.fromkeys((scales[0], scales[-1])):
                    found.append(row(workload, one["size"], dtype, gpus, one["gpu"]))
    return found


def check(config: RunConfig, found: Rehearsal) -> None:
    stage = found.rank * config.parallel.pp // config.parallel.world_size
    assert found.parameters == rank_parameters(config, stage)
    assert found.flops == pytest.approx(rank_flops(config, stage), rel=1e-12)
    assert found.peak_bytes == pytest.approx(memory_estimate(config).total, rel=CLOSE)
    formed = {(one.kind, one.dimension): one for one in step_traffic(config, stage)}
    for one in found.collectives:
        if one.kind != "all-reduce" and one.bytes >= SMALL * one.count:
            assert one.bytes == pytest.approx(formed.pop((one.kind, one.dimension)).bytes, rel=CLOSE)
    assert not formed, "the closed form has exchanges that are not made"


@pytest.mark.parametrize(
    "named",
    [
        ("pretrain_llama3.1", "1b", "bf16", 1, "h200"),
        ("pretrain_llama3.1", "405b", "fp8", 1024, "h100"),  # tp, pp, cp, vp
        ("pretrain_grok1", "314b", "bf16", 512, "h100"),  # ep besides
    ],
    ids=lambda named: "-".join(map(str, named[1:])),
)
def test_a_row_agrees_with_the_closed_forms(named: tuple) -> None:
    config = row(*named)
    check(config, rehearse(config))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_one_layer_at_its_true_width(dtype: str) -> None:
    """Where the gradient of a single weight is a large part of the peak, and in fp8 what is kept of the weights."""
    wishes = tuple(Setting(field=field, value=value, source="test") for field, value in (("gbs", 2), ("seqlen", 4096)))
    request = Request(size="314b", dtype=dtype, gpus=1, gpu="h200", proxy="true-width", settings=wishes)
    config = resolve(RECIPES["pretrain_grok1"], request)
    assert config.model.layers == 1
    check(config, rehearse(config))


@pytest.mark.matrix
def test_layers_that_are_computed_again_or_offloaded() -> None:
    config = row("pretrain_llama3.1", "8b", "fp8", 8, "h100")
    few = replace(config.model, layers=6)
    for fsdp in (True, False):
        work = replace(config.workload, recompute_layers=2, offload_layers=2)
        changed = replace(config, model=few, workload=work, parallel=replace(config.parallel, fsdp=fsdp))
        found = rehearse(changed)
        check(changed, found)
        assert found.host_bytes == pytest.approx(memory_estimate(changed).host, rel=CLOSE)


@pytest.mark.matrix
@pytest.mark.parametrize("config", every_row(), ids=lambda config: f"{config.machine.gpu}-{config.name}")
def test_every_row_agrees_with_the_closed_forms(config: RunConfig) -> None:
    check(config, rehearse(config))
