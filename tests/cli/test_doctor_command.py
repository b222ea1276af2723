"""`llmb-run doctor` on this machine with recorded GPUs: lines, exit codes, JSON."""

import json

from recorded_gpus import install_fake_smi


def test_problem_is_exit_code_1_and_a_line_with_what_to_do(llmb_run, monkeypatch, tmp_path):
    install_fake_smi(monkeypatch, tmp_path / "bin", "sick")
    monkeypatch.setattr("llmb.launch.doctor.software_facts._slurm", lambda: (None, None))
    code, out, err = llmb_run("doctor")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("problem  PCIe"))
    assert lines[at].endswith("GPU 0: x8 of x16")
    assert lines[at + 1].strip().startswith("-> ")
    assert "problems, " in lines[-1]


def test_json_has_findings_and_facts(llmb_run, monkeypatch, tmp_path):
    install_fake_smi(monkeypatch, tmp_path / "bin", "h200")
    monkeypatch.setattr("llmb.launch.doctor.software_facts._slurm", lambda: (None, None))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    _, out, _ = llmb_run("doctor", "--json")
    data = json.loads(out)
    assert {finding["topic"]: finding["level"] for finding in data["findings"]}["power limit"] == "ok"
    assert data["facts"]["gpus"][1]["power_limit_w"] == 700.0
    assert data["facts"]["software"]["tokens"]["HF_TOKEN"] is True
    assert "hf_" not in out


def test_nodelist_is_for_slurm(llmb_run):
    code, out, err = llmb_run("doctor", "--nodelist", "n1")
    assert (code, out) == (1, "")
    assert err == "ERROR: --nodelist names nodes of Slurm; add --slurm\n"
