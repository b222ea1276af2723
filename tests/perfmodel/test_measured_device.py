"""Predictions for GPUs without fitted efficiencies, from the rates that probe measured."""

from dataclasses import replace

import pytest
from test_probe_record import write

from llmb.config.overrides import from_arguments
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_json
from llmb.perfmodel.chip_limits import flops_ceiling
from llmb.perfmodel.explain.run_prediction import predict_run
from llmb.perfmodel.offload.machine_rates import H200, rates_path
from llmb.perfmodel.step_time.cluster_fabric import device
from llmb.perfmodel.step_time.measured_device import measured_device


def predicted(recipes, tmp_path, gpu, workload="pretrain_llama3.1", dtype="bf16", **changes):
    """Return the prediction of Llama 8B on one GPU of 141 GB whose rates are those of an H200, or changed."""
    write(rates_path(tmp_path, gpu), to_json(replace(H200, gpu=gpu, source="measured on n1", **changes)))
    settings = tuple(from_arguments(["num_requests=64", "max_batch_size=32"])) if "inference" in workload else ()
    memory = None if gpu == "h200" else 139 << 30
    request = RunRequest(size="8b", dtype=dtype, gpus=1, gpu=gpu, gpu_memory_bytes=memory, settings=settings)
    return predict_run(resolve(recipes[workload], request, tmp_path), tmp_path)


@pytest.mark.parametrize("workload", ["pretrain_llama3.1", "inference_llama3.1"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_unknown_gpu_with_the_rates_of_an_h200_is_predicted_as_one(recipes, tmp_path, workload, dtype):
    h200 = predicted(recipes, tmp_path, "h200", workload, dtype)
    unknown = predicted(recipes, tmp_path, "x100", workload, dtype)
    assert unknown.value == pytest.approx(h200.value)
    assert unknown.terms == pytest.approx(h200.terms)
    assert "measured on n1" in unknown.source
    low, high = unknown.interval_80
    assert high / low > h200.interval_80[1] / h200.interval_80[0]  # no row of it was ever published


def test_measured_rates_scale_their_terms(recipes, tmp_path):
    h200 = predicted(recipes, tmp_path, "x100")
    half = predicted(recipes, tmp_path, "x100", matmul_tflops=H200.matmul_tflops / 2)
    assert half.terms["gemm"] == pytest.approx(2 * h200.terms["gemm"], rel=0.01)
    assert half.terms["memory_bound"] == pytest.approx(h200.terms["memory_bound"])


def test_what_was_not_measured_is_not_predicted(recipes, tmp_path):
    no_fp8 = predicted(recipes, tmp_path, "x100", dtype="fp8", fp8_tflops=None)
    assert (no_fp8.value, no_fp8.note) == (None, "the rate of fp8 GEMMs was not measured on x100")
    request = RunRequest(size="8b", dtype="bf16", gpus=1, gpu="y100", gpu_memory_bytes=139 << 30)
    unmeasured = predict_run(resolve(recipes["pretrain_llama3.1"], request, tmp_path), tmp_path)
    assert unmeasured.value is None
    assert unmeasured.note == "the rates of y100 are not known; `llmb-run probe` measures them for runs on one GPU"
    rates_path(tmp_path, "y100").write_text(to_json(replace(H200, gpu="y100", source="measured on n1")))
    request = RunRequest(size="8b", dtype="bf16", gpus=8, gpu="y100", gpu_memory_bytes=139 << 30)
    several = predict_run(resolve(recipes["pretrain_llama3.1"], request, tmp_path), tmp_path)
    assert several.note == "rates measured on y100 predict runs of the native engine on one GPU"


def test_listed_gpu_keeps_its_multiprocessors_and_has_no_limit_of_another_family():
    assert measured_device(replace(H200, gpu="rtx-4090")).fabric.sms == 128
    assert flops_ceiling("rtx-4090", "bf16") is None
    assert flops_ceiling("x100", "bf16") is None
    assert flops_ceiling("h20", "bf16").rate > 142e12


def test_unknown_network_refuses_only_what_needs_it():
    with pytest.raises(Exception, match="the network between link domains of 2 of type h100-pcie is not known"):
        _ = device("h100-pcie").network
