"""`--one-rank`: which rank is chosen, where it runs, and what is refused."""

import pytest
from recipe_requests import ALL, overrides

from llmb.config.native.departures import departures
from llmb.config.native.one_rank import describe_rank
from llmb.config.resolve import resolve
from llmb.config.row_selection import OneRankRequest, RunRequest
from llmb.config.spec import Machine
from llmb.errors import ConfigError
from llmb.perfmodel.memory_fit import misfit
from llmb.perfmodel.shards import rank_flops

H200 = Machine(gpu="h200", gpus=1, gpus_per_node=1)
LLAMA, NEMOTRON, GROK = "pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1"


def one_rank(workload, size, gpus, dtype="fp8", rank=None, machine=H200, gpu="h100", settings=(), **more):
    request = OneRankRequest(rank=rank, machine=machine)
    return resolve(
        ALL[workload],
        RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, one_rank=request, settings=settings, **more),
    )


def test_a_rank_of_the_stage_with_most_work_is_chosen():
    config = one_rank(LLAMA, "70b", 64)
    assert config.one_rank.rank == 56
    assert config.pipeline_rank == 7
    assert rank_flops(config, 7) > rank_flops(config, 6)
    assert config.name.endswith("_gbs128_rank56")
    assert describe_rank(config).startswith("rank 56 of 64, pipeline rank 7 of 8 with layers 14-15, 30-31, ")
    assert one_rank(LLAMA, "405b", 1024).pipeline_rank == 1  # has 16 layers, the last 14 and the LM head


def test_the_layout_is_for_one_gpu_type_and_the_rank_runs_on_another():
    config = one_rank(NEMOTRON, "56b", 32)
    assert (config.machine.gpu, config.machine.gpus) == ("h100", 32)
    assert config.launch_machine == H200
    assert config.reference.step_time_s == 15.119
    assert config.workload.recompute_layers == 0  # as published: it fits here, where no H100 would
    assert not departures(config)
    everywhere = resolve(ALL[NEMOTRON], RunRequest(size="56b", dtype="fp8", gpus=32, gpu="h100"))
    assert everywhere.workload.recompute_layers > 0


def test_experts_get_even_loads_unless_set_otherwise():
    config = one_rank(GROK, "314b", 512)
    assert config.workload.balanced_experts
    assert [(o.field, o.value) for o in config.overrides if o.source == "--one-rank"] == [("balanced_experts", True)]
    routed = one_rank(GROK, "314b", 512, settings=overrides(balanced_experts="false"))
    assert not routed.workload.balanced_experts
    assert not one_rank(LLAMA, "70b", 64).workload.balanced_experts


@pytest.mark.parametrize(
    ("workload", "size", "gpus", "dtype"),
    [
        (NEMOTRON, "56b", 32, "fp8"),
        (LLAMA, "70b", 64, "fp8"),
        (LLAMA, "405b", 1024, "fp8"),
        (GROK, "314b", 512, "fp8"),
        (GROK, "314b", 512, "bf16"),
    ],
)
def test_one_rank_of_published_h100_rows_fits_on_an_h200(workload, size, gpus, dtype):
    assert misfit(one_rank(workload, size, gpus, dtype)) is None


def test_what_does_not_fit_names_fewer_layers():
    config = one_rank(LLAMA, "405b", 1024, settings=overrides(pp="1", vp="none", gbs="512"))
    line = misfit(config)
    assert "an h200 has 139.0 GiB" in line
    assert line.endswith("--set model.layers=41 fits, as a proxy")
    smaller = one_rank(LLAMA, "405b", 1024, settings=overrides(pp="1", vp="none", gbs="512", **{"model.layers": "41"}))
    assert misfit(smaller) is None
    assert smaller.proxy == "model.layers=41"


def test_without_a_gpu_a_proxy_runs_on_the_cpu_and_a_model_is_for_the_requested_gpu():
    assert one_rank(LLAMA, "70b", 8, machine=None, proxy="small").launch_machine.gpu == "cpu"
    assert one_rank(LLAMA, "70b", 8, machine=None, gpu=None, proxy="small").machine.gpu == "cpu"
    assert one_rank(LLAMA, "70b", 64, machine=None).launch_machine == Machine(gpu="h100", gpus=1, gpus_per_node=1)


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda: one_rank(LLAMA, "70b", 64, rank=64), "--one-rank 64: the layout has the ranks 0 to 63"),
        (lambda: one_rank(LLAMA, "8b", 1, gpu="h200"), "the layout has one rank; leave it out"),
        (
            lambda: one_rank(LLAMA, "70b", 64, settings=overrides(checkpoint_every="5")),
            "checkpoint_every with --one-rank: one rank does not have the whole model",
        ),
        (
            lambda: one_rank("inference_deepseek-r1", "671b", 4, "nvfp4", gpu="gb200"),
            "--one-rank runs training by the native engine, not inference by native",
        ),
    ],
)
def test_what_one_rank_cannot_run_is_refused_in_one_line(request_of, message):
    with pytest.raises(ConfigError, match=message) as refused:
        request_of()
    assert "\n" not in str(refused.value)
