"""Stored probes of this and older versions, definitions of bus bandwidth, and the GEMM shapes of a model."""

import json
from dataclasses import asdict, replace

import pytest

from llmb.config.serialization import to_json
from llmb.errors import ConfigError
from llmb.perfmodel.offload.machine_rates import H200, machine_path, measured_rates, rates_path, read_rates
from llmb.perfmodel.probe.bus_bandwidth import bandwidths_gbs, bus_factor
from llmb.perfmodel.probe.model_gemms import model_gemms
from llmb.perfmodel.probe.probe_record import (
    CollectiveRate,
    Collectives,
    ProbeDetails,
    bus_gbs,
    read_probe,
    spread,
    stored_probe,
)
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.setup_fields import build_setup

DETAILS = ProbeDetails(
    host="n1", gpu_name="NVIDIA H200", measured_at="2026-11-17 20:02", gemm_tflops={"fp8": spread([1.0, 2.0, 3.0])}
)
# What `llmb-run probe --json` printed on an H200 before it had details.
OLDER = (
    '{"gpu": "h200", "matmul_tflops": 678.7, "fp8_tflops": 1228.3, "attention_forward_tflops": 522.8, '
    '"attention_backward_tflops": 468.3, "square_tokens": 8192, "past_attention_forward_tflops": 590.8, '
    '"past_attention_backward_tflops": 533.4, "memory_gbs": 4116.6, "link_in_gbs": 54.8, "link_out_gbs": 54.9, '
    '"link_both_gbs": 48.6, "source": "measured on vm, NVIDIA H200, 2026-11-17 20:02"}'
)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_details_are_read_and_plans_see_only_the_rates(tmp_path):
    path = write(rates_path(tmp_path, "h200"), to_json({**asdict(H200), "details": asdict(DETAILS)}))
    record = read_probe(path)
    assert (record.rates, record.details) == (H200, DETAILS)
    assert measured_rates("h200", tmp_path) == H200


def test_file_of_an_older_version_is_read(tmp_path):
    record = read_probe(write(tmp_path / "probe.json", OLDER))
    assert record.details is None
    assert record.rates == read_rates(tmp_path / "probe.json")
    assert record.rates.matmul_tflops == 678.7


def test_a_machine_has_its_own_file_and_others_the_last_one_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "login/1")
    assert stored_probe("h200", tmp_path) is None
    write(rates_path(tmp_path, "h200"), OLDER)
    assert stored_probe("h200", tmp_path, "n7").rates.matmul_tflops == 678.7
    slower = json.loads(OLDER) | {"matmul_tflops": 500.0}
    write(machine_path(tmp_path, "h200", "n7"), json.dumps(slower))
    assert stored_probe("h200", tmp_path, "n7").rates.matmul_tflops == 500.0
    assert stored_probe("h200", tmp_path, "n8").rates.matmul_tflops == 678.7
    write(machine_path(tmp_path, "h200", "login/1"), json.dumps(slower | {"matmul_tflops": 400.0}))
    assert measured_rates("h200", tmp_path).matmul_tflops == 400.0


def test_damaged_details_are_one_line(tmp_path):
    path = write(tmp_path / "probe.json", OLDER[:-1] + ', "details": {"host": 7}}')
    with pytest.raises(ConfigError, match=r"details.host: expected text, got 7"):
        read_probe(path)


def test_spread():
    hundred = spread(range(101))
    assert (hundred.median, hundred.p5, hundred.p95, hundred.n) == (50, 5, 95, 101)
    assert spread([]) is None


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875)],
)
def test_bus_bandwidth_by_the_definitions_of_nccl_tests(operation, factor):
    assert bus_factor(operation, 8) == factor
    assert bandwidths_gbs(operation, 8, 10**9, 0.01) == pytest.approx((100.0, 100.0 * factor))


def collectives(backend="nccl", nodes=1):
    rates = [
        CollectiveRate(operation=operation, bytes=size, seconds=spread([1.0]), algbw_gbs=bus, busbw_gbs=bus)
        for operation, size, bus in (
            ("all_reduce", 1 << 30, 480.0), ("all_gather", 1 << 30, 360.0), ("reduce_scatter", 1 << 30, 350.0),
            ("reduce_scatter", 1 << 20, 40.0),
        )
    ]  # fmt: skip
    return Collectives(backend=backend, ranks=8, nodes=nodes, rates=tuple(rates))


def test_bus_bandwidth_of_large_messages_within_a_node():
    assert bus_gbs(collectives()) == 350.0
    assert bus_gbs(None) is bus_gbs(collectives("gloo")) is bus_gbs(collectives(nodes=2)) is None


def test_measured_link_replaces_the_calibrated_one_for_the_native_engine_only():
    native, other = (
        build_setup(find_model("llama3.1-70b"), "h200", 8, "bf16", {"tp": 8, "engine": engine})
        for engine in ("native", "megatron")
    )
    slow = replace(H200, bus_gbs=50.0)
    before, after = (predict(replace(native, rates=rates)).terms for rates in (H200, slow))
    assert after["tp"] > 3 * before["tp"]
    assert (after["gemm"], after["attention"]) == (before["gemm"], before["attention"])
    assert predict(replace(other, rates=slow)) == predict(replace(other, rates=H200))


def test_gemms_of_models():
    assert model_gemms(find_model("llama3.1-8b"), on_cpu=False) == [
        (16384, 6144, 4096), (16384, 4096, 4096), (16384, 28672, 4096), (16384, 4096, 14336),
    ]  # fmt: skip
    assert model_gemms(find_model("llama3.1-8b"), on_cpu=True)[0] == (256, 384, 256)
    experts = model_gemms(find_model("qwen3-30b-a3b"), on_cpu=False)
    assert experts.count((1024, 1536, 2048)) == 8  # gate and up of an expert with its fair number of rows
    assert all(size % 16 == 0 for gemm in experts for size in gemm)
