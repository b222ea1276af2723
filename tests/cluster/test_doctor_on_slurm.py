"""`llmb-run doctor --slurm` with real daemons: every idle node is asked, and the one with sick GPUs is named."""

import json

import pytest
from recorded_gpus import install_fake_smi

pytestmark = pytest.mark.slurm


def test_odd_node_is_named(slurm, install, llmb_run, monkeypatch, tmp_path):
    install_fake_smi(monkeypatch, tmp_path / "bin", "h200", sick_node="n2")
    slurm.call("scontrol", "update", "nodename=n4", "state=drain", "reason=fan")
    code, _, err = llmb_run("doctor", "--slurm", "--nodelist", "n[3-4]")
    assert (code, err.splitlines()[-1]) == (
        1,
        "ERROR: no job gets these nodes: n4 is drain (fan); leave them out of --nodelist",
    )
    code, out, err = llmb_run("doctor", "--slurm", "--json")
    slurm.call("scontrol", "update", "nodename=n4", "state=resume")
    assert code == 1, err
    data = json.loads(out)
    assert [node["host"] for node in data["nodes"]] == ["n1", "n2", "n3"]
    differences = {item["fact"]: item for item in data["odd"]}
    assert differences["power limit"]["usual"] == "2 x 700 W"
    assert differences["power limit"]["nodes"] == {"n2": "400 W, 700 W"}
    assert data["silent"] == {}
    assert [(node["name"], node["reason"]) for node in data["not_asked"]] == [("n4", "fan")]
