"""ENABLE_NCCLTRACE: a short run whose log lists every collective, and a Result that sums them up."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmb import events
from llmb.cli.stored_runs import write_result
from llmb.config.overrides import Setting, from_environment
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Profile, RunConfig, Training
from llmb.errors import ConfigError
from llmb.events import RunEnded, StepDone
from llmb.report.summary import summary
from llmb.results.readers.nccl_log import summarize

TRACE = Path(__file__).parent.parent / "golden" / "logs" / "nccl.log"


def resolved(recipes, environ: dict[str, str], **fields: str) -> RunConfig:
    settings = [*from_environment(environ), *(Setting(field=k, value=v, source="--set") for k, v in fields.items())]
    request = RunRequest(size="314b", dtype="fp8", gpus=256, gpu="gb200", settings=tuple(settings))
    return resolve(recipes["pretrain_grok1"], request)


def test_trace_has_five_steps_by_default(recipes):
    traced = resolved(recipes, {"ENABLE_NCCLTRACE": "true"})
    assert isinstance(traced.workload, Training)
    assert (traced.workload.steps, traced.workload.window) == (5, (3, 5))
    assert ("steps", 5, "ENABLE_NCCLTRACE") in [(o.field, o.value, o.source) for o in traced.overrides]
    longer = resolved(recipes, {"ENABLE_NCCLTRACE": "true", "MAX_STEPS": "20"})
    assert isinstance(longer.workload, Training)
    assert longer.workload.steps == 20


def test_trace_and_profile_exclude_each_other(recipes):
    with pytest.raises(ConfigError, match="exclude each other"):
        resolved(recipes, {"ENABLE_NCCLTRACE": "true", "ENABLE_PROFILE": "true"})


def test_profiled_ranks_must_exist(recipes):
    config = resolved(recipes, {"ENABLE_PROFILE": "true", "PROFILE_RANKS": "0,255"})
    assert config.profile.profile_ranks == (0, 255)
    with pytest.raises(ConfigError, match="there is no rank 256; the run has ranks 0 to 255"):
        resolved(recipes, {"ENABLE_PROFILE": "true", "PROFILE_RANKS": "0,256"})
    config = resolved(recipes, {"ENABLE_PROFILE": "true", "PROFILE_RANKS": "0-3, 255"})
    assert config.profile.profile_ranks == (0, 1, 2, 3, 255)
    for wrong in ("3-0", "-1", "0-", "0-9999999", "a"):
        with pytest.raises(ConfigError, match=f"expected whole numbers and ranges such as 0,8-15, got '{wrong}'"):
            resolved(recipes, {"ENABLE_PROFILE": "true", "PROFILE_RANKS": wrong})
    with pytest.raises(ConfigError, match="PROFILE_RANKS: profile_ranks has no effect without profiling"):
        resolved(recipes, {"PROFILE_RANKS": "0"})


def test_collectives_are_in_the_result_of_the_native_engine(config, run_folder):
    """The engine records its steps as events; NCCL itself writes to the log."""
    run_folder.log.write_bytes(b"step 1\n" + TRACE.read_bytes())
    for step in (1, 2, 3):
        events.append(run_folder.events(0), StepDone(rank=0, step=step, steps=3, seconds=1.0))
    events.append(run_folder.events(0), RunEnded(time=1.0, status="ok"))
    assert write_result(run_folder, config).collectives == ()  # no trace requested
    result = write_result(run_folder, replace(config, profile=Profile(nccl_trace=True)))
    rows = [(row.operation, row.calls, row.bytes, row.ranks) for row in result.collectives]
    assert rows == [(row.operation, row.calls, row.bytes, row.ranks) for row in summarize(TRACE)]
    assert rows
    assert result.status == "ok"
    assert "AllReduce" in summary(result)
