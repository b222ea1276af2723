"""`predict` and `tune` of a GPU without fitted efficiencies, from what `probe` stored on this machine."""

import json
from dataclasses import replace

import pytest

from llmb.config.serialization import to_json
from llmb.perfmodel.offload.machine_rates import H200, rates_path

SERVE = ("--task", "serve", "--model", "llama3.1-8b", "--isl", "512", "--osl", "512")


@pytest.fixture
def probed(tmp_path):
    """Store rates of a GPU that is not listed, and of one whose family was never fitted."""

    def store(gpu, **changes):
        path = rates_path(tmp_path / "llmb", gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(replace(H200, gpu=gpu, source="measured on n1", **changes)))

    store("x100", device_memory_bytes=64e9)
    store("rtx-4090", matmul_tflops=150.0, fp8_tflops=None, memory_gbs=930.0)
    return store


def run_json(llmb_run, *command):
    code, out, err = llmb_run(*command, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("engine", ["vllm", "native"])
def test_serving_is_predicted_from_the_probe(llmb_run, probed, engine):
    command = ("predict", *SERVE, "--engine", engine, "--dtype", "bf16", "--concurrency", "16", "--gpu-type")
    x100, h200 = (run_json(llmb_run, *command, gpu) for gpu in ("x100", "h200"))
    assert x100["tpot_ms"] == pytest.approx(h200["tpot_ms"])
    assert x100["ceilings"].startswith("`llmb-run probe`, measured on n1")
    assert h200["ceilings"].startswith("fractions of peaks fitted to published rows")
    assert x100["energy"] is None
    slower = run_json(llmb_run, *command, "rtx-4090", "--set", "kv_dtype=bf16")
    assert 3 < slower["tpot_ms"] / x100["tpot_ms"] < 4.5  # 930 of 4,100 GB/s, and host times


def test_training_is_predicted_from_the_probe_without_an_mfu(llmb_run, probed):
    command = ("predict", "--model", "llama3.2-1b", "--scale", "1", "--gpu-type")
    x100, h200 = (run_json(llmb_run, *command, gpu) for gpu in ("unlisted:x100", "h200"))
    assert x100["step_time_s"] == pytest.approx(h200["step_time_s"])
    assert (x100["mfu"], h200["mfu"] is None) == (None, False)
    low, high = x100["interval_80"]
    assert high / low > h200["interval_80"][1] / h200["interval_80"][0]
    _, out, _ = llmb_run(*command, "x100")
    assert "ceilings: `llmb-run probe`, measured on n1; no published row of an x100 was fitted" in out
    assert "of 60 GiB" in out
    assert "MFU" not in out


def test_tune_searches_on_a_probed_gpu(llmb_run, probed):
    tuned = run_json(llmb_run, "tune", *SERVE, "--gpu-type", "x100", "--scale", "1")
    assert tuned["ceilings"].startswith("`llmb-run probe`")
    assert tuned["best"]["memory_gib"] < 60
    tuned = run_json(llmb_run, "tune", "--model", "llama3.2-1b", "--gpu-type", "rtx-4090", "--scale", "1")
    assert tuned["best"]["memory_gib"] < 24


def test_recipe_rows_are_predicted_on_a_probed_gpu(llmb_run, probed):
    command = ("predict", "-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--task", "serve", "--gpu-type")
    data = run_json(llmb_run, *command, "x100", "--concurrency", "8")
    assert data["gpu"] == "x100"
    assert data["batch"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-type", "y100", "--scale", "1"], "of any other GPU `llmb-run probe` measures the rates"),
        (["--gpu-type", "l4", "--scale", "1"], "on such a machine `llmb-run probe` measures it, and predictions use"),
        (["--gpu-type", "rtx-4090", "--scale", "1", "--dtype", "fp8"], "fp8 GEMMs was not measured on rtx-4090"),
        (["--gpu-type", "x100", "--scale", "2"], "the network between GPUs of type x100 is not known"),
    ],
)
def test_what_was_not_measured_is_refused(llmb_run, probed, options, message):
    code, _, err = llmb_run("predict", "--model", "llama3.2-1b", *options)
    assert code == 1
    assert message in err


def test_a_probed_gpu_without_its_memory_says_so(llmb_run, probed):
    probed("z100")
    code, _, err = llmb_run("predict", *SERVE, "--gpu-type", "z100", "--concurrency", "4")
    assert code == 1
    assert "the memory of a z100 is not known; `llmb-run probe`" in err


def test_a_probe_of_a_fitted_gpu_scales_only_the_native_engine_served(llmb_run, probed):
    command = ("predict", *SERVE, "--gpu-type", "h200", "--concurrency", "4", "--engine")
    before = [run_json(llmb_run, *command, engine)["tpot_ms"] for engine in ("vllm", "native")]
    probed("h200", memory_gbs=H200.memory_gbs / 2)
    vllm, native = (run_json(llmb_run, *command, engine) for engine in ("vllm", "native"))
    assert vllm["tpot_ms"] == before[0]
    assert native["tpot_ms"] > 1.3 * before[1]
    assert native["ceilings"] == "fitted to published rows, scaled to this chip: measured on n1"


def test_figures_of_a_probed_gpu_are_explained_and_never_refuted_by_another_chip(llmb_run, probed):
    figures = ("--tokens-per-s", "900000", "--isl", "512", "--osl", "512", "--model", "llama3.1-8b")
    data = run_json(llmb_run, "explain", *figures, "--gpu-type", "x100")
    assert data["verdict"] == "unknown"
    assert data["expected"][0]["ratio"] > 2
