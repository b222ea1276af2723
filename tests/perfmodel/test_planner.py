"""Out-of-core runs as resolved: plan and prediction stand in the configuration, choices that are fixed stay fixed."""

import json

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import build, to_json
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.memory_estimate import memory_estimate


def proxy(recipes, size="8b", dtype="fp32", **overrides):
    settings = tuple(Setting(field=name, value=str(value), source="--set") for name, value in overrides.items())
    request = RunRequest(size=size, dtype=dtype, gpus=1, proxy="small", settings=settings)
    return resolve(recipes["outofcore_llama3"], request)


def test_configuration_is_complete_and_survives_serialization(recipes):
    config = proxy(recipes)
    work = config.workload
    assert work.gbs == work.plan.gbs == 2
    assert (work.plan.seqlen, work.plan.dtype, work.plan.update) == (1024, "fp32", "stochastic")
    assert len(work.plan.levels) == config.model.layers * work.plan.chunks_per_round
    assert build(RunConfig, json.loads(to_json(config))) == config


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", ["1b", "3b", "8b", "15b", "32b", "70b"])
def test_every_proxy_fits_its_budgets_and_offloads(recipes, size, dtype):
    work = proxy(recipes, size, dtype).workload
    assert sum(work.prediction.device_bytes.values()) <= work.device_gib * 2**30
    assert sum(work.prediction.host_bytes.values()) <= work.host_gib * 2**30
    assert work.prediction.inbound_bytes > 0 < work.prediction.outbound_bytes
    assert {"param", "grad", "state", "rest"} <= work.prediction.host_bytes.keys()


def test_fixed_choices_are_kept_and_recorded(recipes):
    config = proxy(recipes, gbs=3, chunk_tokens=512, resident_params=0, update="stochastic", clip=1.0)
    work = config.workload
    assert (work.plan.gbs, work.plan.chunk_tokens, work.plan.resident_params) == (3, 512, 0)
    assert work.plan.update_at == "forward"  # only then the norm of all gradients is known
    assert {o.field for o in config.overrides} == {"gbs", "chunk_tokens", "resident_params", "update", "clip"}


@pytest.mark.slow
@pytest.mark.parametrize(("seqlen", "chunks"), [(1, 1), (101, 1), (256, 1), (257, 2), (1021, 4)])
def test_proxy_takes_any_sequence_length(recipes, seqlen, chunks):
    work = proxy(recipes, seqlen=seqlen).workload
    assert work.plan.chunks_per_group == chunks


def test_the_memory_shown_is_the_plans(recipes):
    config = proxy(recipes)
    work = config.workload
    estimate = memory_estimate(config)
    assert estimate.fits
    assert estimate.total == sum(work.prediction.device_bytes.values())
    assert estimate.host == sum(work.prediction.host_bytes.values())


def test_nothing_is_predicted_from_nominal_rates(recipes):
    work = proxy(recipes).workload
    assert work.prediction.step_s is work.prediction.compute_s is None
    assert work.prediction.hardware_flops > 0


def test_a_stated_disk_is_predicted_and_an_unknown_one_is_not(recipes):
    def h200(**overrides):
        settings = {"seqlen": 8192, "host_gib": 7, "device_gib": 24, "disk_gib": 64, "gbs": 1, "chunk_tokens": 8192}
        settings |= {f"resident_{kind}": 0 for kind in ("params", "grads", "states")} | {"full_saves": 0} | overrides
        settings |= {"activation_slots": 0, "attention_saves": 0, "model.layers": 4}
        listed = tuple(Setting(field=name, value=str(value), source="--set") for name, value in settings.items())
        request = RunRequest(size="8b", dtype="bf16", gpus=1, gpu="h200", settings=listed)
        return resolve(recipes["outofcore_llama3"], request).workload

    fast, slow, unknown = h200(disk_gbs=7), h200(disk_gbs=0.5), h200()
    assert fast.plan.disk_states == slow.plan.disk_states > 0
    assert fast.prediction.step_s < slow.prediction.step_s
    assert fast.prediction.rates["source"].endswith("a disk of 7 GB/s as stated")
    assert unknown.prediction.step_s is unknown.prediction.disk_read_s is None
    assert unknown.prediction.disk_read_bytes > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"update": "master"}, "update=master has no effect with fp32"),
        ({"lr_warmup_steps": 5, "lr_decay_steps": 5}, "lr_decay_steps=5: must be more than lr_warmup_steps=5"),
        ({"model.rope": "none"}, "out-of-core training does not compute rope=None"),
        ({"model.gated": "false"}, "out-of-core training does not compute gated=False"),
        ({"model.o_bias": "true", "full_saves": 1}, "full_saves has no effect on"),
        ({"disk_path": "/tmp"}, "disk_path has no effect without a disk; also set disk_gib"),
        ({"disk_gib": 1, "disk_gbs": 0}, "disk_gbs (--set): 0.0 is out of range; it must be more than 0"),
        ({"pack": "true"}, "pack has no effect on synthetic tokens"),
        ({"activation_slots": -1}, "activation_slots (--set): -1 is out of range; it must be at least 0"),
    ],
)
def test_contradictory_settings_are_refused(recipes, overrides, message):
    with pytest.raises(ConfigError) as caught:
        proxy(recipes, **overrides)
    assert message in str(caught.value)
