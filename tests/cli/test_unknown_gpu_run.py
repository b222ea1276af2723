"""A GPU that nobody knows, from resolve to report: peaks null, MFU absent, ceilings as probe measured them."""

import json
from dataclasses import replace
from datetime import datetime

import pytest
from fake_gpu import install_fake_gpu

from llmb.cli.jobs.jobs import open_store
from llmb.cli.report.page_writer import write_report
from llmb.cli.stored_runs import write_result
from llmb.config.serialization import build, to_json
from llmb.config.spec import RunConfig
from llmb.events import RequestDone, RunEnded, RunStarted, StepDone, append
from llmb.launch.run_folder import RunFolder
from llmb.perfmodel.offload.machine_rates import H200, rates_path

NAME, KEY, MIB = "NVIDIA Z9000 96GB", "z9000-96gb", 98304
FALLBACK = "no programmatic dependent launch (compute capability 8.6): small kernels start one after the other"
TRAIN = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1", "--proxy", "--set", "window=3-10"]
SERVE = ["-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1"]
OFFLOAD = ["-w", "outofcore_llama3", "-s", "8b", "--dtype", "bf16", "--proxy"]


@pytest.fixture
def install(monkeypatch, tmp_path):
    """An install folder on a machine with one such GPU."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "llmb"))
    install_fake_gpu(monkeypatch, tmp_path / "bin", NAME, MIB)
    return tmp_path / "llmb"


def store_probe(install):
    path = rates_path(install, KEY)
    path.parent.mkdir(parents=True)
    path.write_text(to_json(replace(H200, gpu=KEY, matmul_tflops=100.0, fp8_tflops=None, source="measured on n1")))


def resolved(llmb_run, *arguments) -> RunConfig:
    code, out, err = llmb_run("submit", *arguments, "--dry-run", "--json")
    assert (code, err) == (0, "")
    return build(RunConfig, json.loads(out.splitlines()[-1]), "config")


def finish(install, config, events):
    """Store a run as its engine and the launcher leave it; return its folder and its job."""
    run = RunFolder.create(install, config, datetime.now())
    start = RunStarted(time=0.0, gpu_name=NAME, host="n1", fallbacks=(FALLBACK,))
    for event in (start, *events, RunEnded(time=99.0, status="ok")):
        append(run.events(0), event)
    with open_store() as store:
        job = store.add(config, run.path)
        store.finish(job, write_result(run, config))
    return run


def trained(install, config, seconds=0.5):
    work = config.workload
    tokens = work.gbs * work.seqlen
    steps = [
        StepDone(step=n, steps=work.steps, seconds=seconds, tokens=tokens, loss=9.0, time=float(n))
        for n in range(1, work.steps + 1)
    ]
    return finish(install, config, steps)


def test_training_from_resolve_to_report(llmb_run, install):
    store_probe(install)
    config = resolved(llmb_run, *TRAIN)
    assert (config.machine.gpu, config.machine.gpu_memory_bytes) == (KEY, MIB << 20)
    assert (config.ceilings.matmul_tflops, config.ceilings.source) == (100.0, "measured on n1")
    run = trained(install, config)
    result = json.loads(run.result.read_text())
    assert (result["mfu"], result["hfu"], result["mfu_peak_tflops"], result["reference"]) == (None,) * 4
    ceiling = result["measured_ceiling"]
    assert ceiling["fraction"] == pytest.approx(result["tflops_per_gpu"] / 100.0)
    assert (ceiling["tflops"], ceiling["dtype"], ceiling["source"]) == (100.0, "bf16", "measured on n1")
    assert result["fallbacks"] == [FALLBACK]
    assert {"NO_PEAK", "FALLBACK"} <= {warning["code"] for warning in result["warnings"]}
    assert "OTHER_GPU" not in {warning["code"] for warning in result["warnings"]}
    assert write_report(run) == f"report: {run.report_page}"
    page = run.report_page.read_text()
    assert NAME in page
    assert "of the measured ceiling" in page
    assert FALLBACK in page
    code, out, _ = llmb_run("jobs", "show", "L1")
    assert (code, "MFU is not given, its measured ceiling is" in " ".join(out.split())) == (0, True)
    trained(install, config, seconds=0.4)
    for command in (("jobs",), ("compare", "L1", "L2"), ("explain", "L1"), ("report", "L1")):
        code, _, err = llmb_run(*command)
        assert (command, code, err) == (command, 0, "")


def test_without_a_probe_the_ceiling_is_null_and_the_warning_names_it(llmb_run, install):
    config = resolved(llmb_run, *TRAIN)
    assert config.ceilings is None
    result = json.loads(trained(install, config).result.read_text())
    assert result["measured_ceiling"] is None
    (text,) = [warning["text"] for warning in result["warnings"] if warning["code"] == "NO_PEAK"]
    assert text.endswith("MFU is not given, `llmb-run probe` measures a ceiling that is given instead")


def test_serving_stands_beside_measured_ceilings(llmb_run, install):
    store_probe(install)
    config = resolved(llmb_run, *SERVE)
    done = [
        RequestDone(
            request=n, arrival=0.0, first_token=0.1, token_times=(0.1, 0.2), end=0.2, input_tokens=8, output_tokens=2
        )
        for n in range(4)
    ]
    run = finish(install, replace(config, workload=replace(config.workload, num_requests=4, osl=2)), done)
    result = json.loads(run.result.read_text())
    assert (result["measured_ceiling"]["fraction"], result["measured_ceiling"]["tflops"]) == (None, 100.0)
    assert "measured ceilings" in llmb_run("jobs", "show", "L1")[1]
    assert write_report(run) == f"report: {run.report_page}"


def test_offload_plans_with_measured_rates(llmb_run, install):
    store_probe(install)
    config = resolved(llmb_run, *OFFLOAD)
    assert config.workload.prediction.rates["source"] == "measured on n1"
    assert config.predicted.value > 0
