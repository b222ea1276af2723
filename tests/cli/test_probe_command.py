"""`llmb-run probe`: a real measurement of this CPU, stored for plans; GPUs that are not present are refused."""

import json
from dataclasses import asdict

import pytest

from llmb.cli.probe_command import _probe_target
from llmb.launch.command import engine_install_command
from llmb.perfmodel.offload.machine_rates import H200, rates_of, rates_path

CPU = ["probe", "--gpu-type", "cpu"]
PLAN = ["plan", "-w", "outofcore_llama3", "-s", "8b", "--gpu-type", "h200", "--host-gb", "60", "--device-gb", "24"]


@pytest.mark.slow
def test_probe_measures_stores_and_prints_the_rates_of_plans(llmb_run, tmp_path):
    code, out, err = llmb_run(*CPU)
    assert code == 0, err
    path = rates_path(tmp_path / "llmb", "cpu")
    assert f"stored in {path}" in out
    rates = rates_of("cpu", tmp_path / "llmb")
    assert rates.gpu == "cpu"
    assert rates.fp8_tflops is None
    for name, rate in asdict(rates).items():
        assert name in ("gpu", "fp8_tflops", "source") or rate > 0
    assert rates.source.startswith("measured on ")
    assert rates.source in out
    progress = [line.split(":")[0].strip() for line in err.splitlines()]
    assert progress[1:] == [
        "matmul", "attention forward", "past attention forward", "attention backward", "past attention backward",
        "memory", "link in", "link out", "link both",
    ]  # fmt: skip


def test_json_output_equals_the_stored_file(llmb_run, monkeypatch, tmp_path):
    measured = {
        "matmul_tflops": 1.0, "fp8_tflops": None, "attention_forward_tflops": 1.0, "attention_backward_tflops": 1.0,
        "square_tokens": 1, "past_attention_forward_tflops": 1.0, "past_attention_backward_tflops": 1.0,
        "memory_gbs": 1.0, "link_in_gbs": 1.0, "link_out_gbs": 1.0, "link_both_gbs": 1.0,
    }  # fmt: skip
    monkeypatch.setattr("llmb.launch.torch_process.run_probe", lambda device, on_progress: measured)
    code, out, _ = llmb_run(*CPU, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(rates_path(tmp_path / "llmb", "cpu").read_text())


@pytest.mark.slow
def test_plan_with_rates_of_an_older_version_asks_for_a_new_probe(llmb_run, tmp_path):
    path = rates_path(tmp_path / "llmb", "h200")
    path.parent.mkdir(parents=True)
    older = {name: rate for name, rate in asdict(H200).items() if name != "square_tokens" and "past" not in name}
    path.write_text(json.dumps(older))
    code, out, err = llmb_run(*PLAN)
    assert (code, out) == (1, "")
    missing = f"{path}: field 'square_tokens' is missing"
    assert err == f"ERROR: {missing}; run `llmb-run probe` again, which measures this machine anew\n"


@pytest.mark.parametrize(
    ("names", "gpu_type", "message"),
    [
        ([], "h200", "this machine has no GPU, so no h200 can be measured"),
        ([], "v100", "unknown GPU type 'v100'"),
        (["NVIDIA H200"], "h100", "this machine has NVIDIA H200, which is h200, not h100"),
        (["NVIDIA H100 PCIe"], "h100", "this machine has NVIDIA H100 PCIe, which is h100-pcie, not h100"),
    ],
)
def test_gpu_that_is_not_present_cannot_be_measured(llmb_run, monkeypatch, names, gpu_type, message):
    monkeypatch.setattr("llmb.launch.local_machine.gpu_names", lambda: names)
    code, out, err = llmb_run("probe", *(["--gpu-type", gpu_type] if gpu_type else []))
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_probe_without_torch_says_what_to_install(llmb_run, monkeypatch):
    monkeypatch.setattr("llmb.launch.torch_process.find_spec", lambda name: None)
    code, _, err = llmb_run(*CPU)
    assert code == 1
    assert err.splitlines()[-1] == f"ERROR: probe needs torch, which is not installed: {engine_install_command()}"


def test_failed_probe_is_one_line(llmb_run, monkeypatch, tmp_path):
    monkeypatch.setattr("llmb.launch.torch_process.PROBE_MODULE", "llmb.nothing_of_this_name")
    code, _, err = llmb_run(*CPU)
    assert code == 2
    assert err.splitlines()[-1].startswith("ERROR: the probe failed: ")
    assert "nothing_of_this_name" in err
    assert not rates_path(tmp_path / "llmb", "cpu").exists()


def test_unwritable_folder_is_refused_before_measuring(llmb_run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "file"))
    code, _, err = llmb_run(*CPU)
    assert code == 1
    assert err.count("\n") == 1
    assert "cannot write to" in err


def test_gpu_that_is_not_in_the_table_is_measured_under_its_own_name(monkeypatch):
    monkeypatch.setattr("llmb.launch.local_machine.gpu_names", lambda: ["NVIDIA GeForce RTX 4080"])
    for requested in (None, "rtx-4080", "unlisted:RTX-4080"):
        assert _probe_target(requested) == ("rtx-4080", "NVIDIA GeForce RTX 4080")
