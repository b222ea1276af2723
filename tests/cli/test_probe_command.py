"""`llmb-run probe`: a real measurement of this CPU, stored for plans; GPUs that are not present are refused."""

import json
import socket
from dataclasses import asdict

import pytest

from llmb.cli.machine.probe_command import _probe_target
from llmb.launch.command import engine_install_command
from llmb.perfmodel.offload.machine_rates import H200, machine_path, rates_of, rates_path
from llmb.perfmodel.probe.node_collectives import stored_node_collectives
from llmb.perfmodel.probe.probe_record import read_probe, stored_probe

CPU = ["probe", "--gpu-type", "cpu"]
PLAN = ["plan", "-w", "outofcore_llama3", "-s", "8b", "--gpu-type", "h200", "--host-gb", "60", "--device-gb", "24"]


@pytest.mark.slow
def test_probe_measures_stores_and_prints_the_rates_of_plans(llmb_run, tmp_path):
    code, out, err = llmb_run(*CPU, "--disk-path", str(tmp_path))
    assert code == 0, err
    path = rates_path(tmp_path / "llmb", "cpu")
    assert f"stored in {path}" in out
    rates = rates_of("cpu", tmp_path / "llmb")
    assert rates.gpu == "cpu"
    assert rates.fp8_tflops is None
    for name, rate in asdict(rates).items():
        assert name in ("gpu", "fp8_tflops", "bus_gbs", "device_memory_bytes", "source") or rate > 0
    assert rates.source.startswith("measured on ")
    assert rates.source in out
    progress = [line.split(":")[0].strip() for line in err.splitlines()]
    assert progress[1:] == [
        "matmul", "attention forward", "past attention forward", "attention backward", "past attention backward",
        "memory", "link in", "link out", "link both", "disk read", "disk write", "disk both",
        "gemms of the model, fp32", "gemms of the model, bf16", "launch", "host memory",
    ]  # fmt: skip
    stored = stored_probe("cpu", tmp_path / "llmb")
    assert stored == read_probe(machine_path(tmp_path / "llmb", "cpu", socket.gethostname()))
    details = stored.details
    assert (details.model, details.collectives, details.gpu_uuid) == ("Llama-3.1-8B", None, None)
    assert details.gemm_tflops.keys() == {"fp32", "bf16"}
    assert all(
        0 < s.p5 <= s.median <= s.p95 for s in (details.launch_us, details.host_memory_gbs, *details.rates.values())
    )


def test_json_output_equals_the_stored_file(llmb_run, monkeypatch, tmp_path):
    measured = {
        "matmul_tflops": 1.0, "fp8_tflops": None, "attention_forward_tflops": 1.0, "attention_backward_tflops": 1.0,
        "square_tokens": 1, "past_attention_forward_tflops": 1.0, "past_attention_backward_tflops": 1.0,
        "memory_gbs": 1.0, "link_in_gbs": 1.0, "link_out_gbs": 1.0, "link_both_gbs": 1.0,
    }  # fmt: skip
    shapes_of = {}

    def run_probe(device, on_progress, shapes, disk_path):
        shapes_of[device] = shapes
        return dict(measured)

    seconds = {"median": 1e-3, "p5": 1e-3, "p95": 2e-3, "n": 7}
    rate = {"operation": "all_reduce", "bytes": 1024, "seconds": seconds, "algbw_gbs": 1.0, "busbw_gbs": 1.5}
    collectives = {"backend": "gloo", "ranks": 4, "nodes": 1, "rates": [rate]}
    monkeypatch.setattr("llmb.launch.torch_process.run_probe", run_probe)
    monkeypatch.setattr("llmb.launch.probe.collective_ranks.collectives_here", lambda device, ranks, say: collectives)
    code, out, _ = llmb_run(*CPU, "--json", "--ranks", "4", "--model", "llama3.1-70b")
    assert code == 0
    data = json.loads(out)
    assert data == json.loads(rates_path(tmp_path / "llmb", "cpu").read_text())
    assert data.items() >= measured.items()  # the keys of older versions
    assert (data["details"]["model"], data["details"]["collectives"]) == ("Llama-3.1-70B", collectives)
    assert (256, 640, 512) in shapes_of["cpu"]  # keys, values and queries of the 70B, 1/16 as wide
    code, out, _ = llmb_run(*CPU, "--ranks", "4")
    assert "all-reduce  1 KiB  1,000  1,000 to 2,000  us" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks: expected a number of processes, 1 or more"),
        (["--nodelist", "n1"], "--nodelist names nodes of Slurm; add --slurm"),
        (["--model", "llama3.1-8b", "-w", "pretrain_llama3.1"], "with --model or with -w, not with both"),
        (["-s", "8b"], "-s names a size of -w"),
        (["--model", "llama9"], "llama9"),
    ],
)
def test_wrong_request_is_one_line_before_anything_is_measured(llmb_run, arguments, message):
    code, out, err = llmb_run(*CPU, *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


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


def test_collectives_among_nodes_are_stored_for_each_of_them(llmb_run, monkeypatch, tmp_path):
    seconds = {"median": 1e-3, "p5": 1e-3, "p95": 2e-3, "n": 7}
    rate = {"operation": "all_gather", "bytes": 1024, "seconds": seconds, "algbw_gbs": 1.0, "busbw_gbs": 1.5}
    measured = {"backend": "nccl", "ranks": 16, "nodes": 2, "rates": [rate, {**rate, "bytes": 1 << 30, "busbw_gbs": 9}]}
    on_nodes = "llmb.launch.probe.collective_ranks.collectives_on_nodes"
    monkeypatch.setattr(on_nodes, lambda *arguments: (measured, ("n1", "n2")))
    code, out, err = llmb_run("probe", "--slurm", "--gpu-type", "h200", "--json")
    assert (code, json.loads(out)) == (0, measured)
    assert "for 2 nodes" in err
    stored = stored_node_collectives("h200", tmp_path / "llmb", "n2.cluster")
    assert stored == stored_node_collectives("h200", tmp_path / "llmb", "n1")
    assert (stored.nodes, [largest.busbw_gbs for largest in stored.largest]) == (("n1", "n2"), [9.0])
    assert stored_node_collectives("h200", tmp_path / "llmb", "n3") is None
    code, out, err = llmb_run("probe", "--slurm")
    assert code == 0
    assert "not stored: nothing says which GPU the nodes have; name it with --gpu-type" in err
