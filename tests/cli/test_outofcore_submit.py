"""Out-of-core proxy from the command line to its result, prediction and profile page."""

import json

import pytest

from llmb.config.serialization import to_json
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU, rates_path


@pytest.mark.slow
def test_profiled_proxy_reports_its_prediction_and_profile_page(llmb_run, tmp_path):
    path = rates_path(tmp_path / "llmb", "cpu")
    path.parent.mkdir(parents=True)
    path.write_text(to_json(NOMINAL_CPU).replace("nominal", "measured on Monday"))
    line = "submit -w outofcore_llama3 -s 3b --dtype fp32 --scale 1 --proxy --seqlen 512 -p --json"
    code, out, err = llmb_run(*line.split(), "--set", "gbs=1", "--set", "steps=2")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["status"] == "ok"
    assert result["predicted"]["source"] == "its plan, by rates measured on Monday"
    assert result["predicted"]["ratio"] > 0
    (page,) = (tmp_path / "llmb").glob("runs/L1-outofcore-llama3-3b-fp32-proxy/profile/profile.html")
    assert f"profile: {page}" in err
    assert "against prediction" in err


def test_missing_gpu_is_refused_before_a_plan_is_searched(llmb_run, monkeypatch):
    monkeypatch.setattr("llmb.launch.local_machine.gpu_names", lambda: [])
    monkeypatch.setattr("llmb.perfmodel.offload.planner.plan_workload", lambda *_: pytest.fail("a plan was searched"))
    line = "submit -w outofcore_llama3 -s 8b --seqlen 65536 --host-gb 178 --device-gb 78 --on local"
    code, out, err = llmb_run(*line.split())
    assert (code, out) == (1, "")
    assert err.startswith("ERROR: 1 x h100 requested, this machine has no GPU; --proxy without ")
    assert err.count("\n") == 1
