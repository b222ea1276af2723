"""The benchmark end to end on a small Llama: recorded events match the configuration."""

import gzip
import json
import re
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import FakeNvml
from small_serving import CONFIG, served

from llmb.events import GpuSample, RunStarted
from llmb.perfmodel.params import parameters
from llmb.runtime.nvml_gpu import NvmlGpu
from llmb.serve.benchmark import serving_benchmark


@pytest.fixture
def serve(tmp_path):
    """Serve the changed configuration in its own run folder."""
    return lambda **changes: served(tmp_path / f"run {len(list(tmp_path.iterdir()))}", **changes)


@pytest.mark.slow
def test_run_records_requests_and_warmup(serve, capsys) -> None:
    done = serve()
    assert (done.code, done.ended().status, done.ended().reason) == (0, "ok", None)
    assert isinstance(done.events()[0], RunStarted)
    measured, warmup = done.requests(), done.requests(warmup=True)
    assert [r.request for r in measured] == list(range(9))
    assert [r.request for r in warmup] == list(range(4))  # the concurrency
    for r in (*measured, *warmup):
        assert (r.input_tokens, r.output_tokens, r.requested_tokens, r.finish) == (12, 6, 6, "length")
        assert len(r.token_times) == 6
        assert r.arrival < r.first_token == r.token_times[0]
        assert r.token_times[-1] == r.end
    assert done.samples()[-1].done == done.samples()[-1].requests == 9
    assert done.samples()[-1].output_tokens == 54
    assert done.samples(warmup=True)[-1].done == 4
    facts = done.facts()
    assert (facts.requests, facts.warmup_requests, facts.block_tokens) == (9, 4, 16)
    assert facts.kv_blocks == done.samples()[-1].blocks
    assert facts.weight_bytes == 4 * (parameters(CONFIG.model) + 8)  # with the RoPE frequencies of 16 channels
    assert facts.cache_bytes == facts.kv_blocks * 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, width, fp32
    assert (facts.dequantised, facts.weights_note, facts.graph_batches) == (False, None, ())
    assert facts.warmup_s > 0
    assert facts.peak_memory_bytes > 0
    assert (facts.energy_joules, facts.energy_note) == (None, "no energy counter: the run is on a cpu device")
    out = capsys.readouterr().out
    assert re.search(r"^warm-up [\d.]+ s: 4/4 requests \| \d+ output tokens/s \| 0 running, 0 waiting", out, re.M)
    assert re.search(r"^measured [\d.]+ s: 9/9 requests", out, re.M)


@pytest.mark.slow
def test_state_of_the_gpu_is_sampled(serve, monkeypatch) -> None:
    clock = count().__next__  # a second between a read of the counter and one of the time, however busy the machine is
    nvml = FakeNvml(clock=clock)
    monkeypatch.setattr("llmb.runtime.gpu_sampler.open_gpu", lambda device: NvmlGpu(nvml, "GPU-1234"))
    monkeypatch.setattr("llmb.serve.benchmark.energy.time", SimpleNamespace(perf_counter=clock))
    done = serve()
    samples = done.events(GpuSample)
    assert {sample.measured for sample in samples} == {False, True}
    assert done.facts().mean_power_w == pytest.approx(200)


def peak_concurrency(requests: list) -> int:
    """Return the peak number of requests that had arrived and not ended."""
    return max(sum(r.arrival <= at.arrival < r.end for r in requests) for at in requests)


@pytest.mark.slow
def test_unlimited_and_limited_concurrency(serve) -> None:
    at_once = serve(concurrency=100).requests()
    assert {r.arrival for r in at_once} == {0.0}
    assert peak_concurrency(at_once) == 9
    closed = serve(concurrency=2).requests()
    assert [r.arrival for r in closed[:2]] == [0.0, 0.0]
    assert {r.arrival for r in closed[2:]} <= {r.end for r in closed}
    assert peak_concurrency(closed) == 2


@pytest.mark.slow
def test_without_streaming_only_the_end_is_recorded(serve) -> None:
    for r in serve(streaming=False).requests():
        assert (r.first_token, r.token_times, r.output_tokens) == (None, (), 6)
        assert r.end > r.arrival


@pytest.mark.slow
def test_length_distribution_of_requests_and_outputs(serve) -> None:
    requests = serve(lengths="uniform", isl_spread=6.0, osl_spread=4.0, num_requests=20).requests()
    assert all(6 <= r.input_tokens <= 18 and 2 <= r.output_tokens == r.requested_tokens <= 10 for r in requests)
    assert len({r.input_tokens for r in requests}) > 3


@pytest.mark.slow
def test_warmup_requests_and_output_lengths(serve) -> None:
    none = serve(warmup_requests=0)
    assert none.requests(warmup=True) == []
    assert (none.facts().warmup_requests, none.facts().warmup_s) == (0, None)
    long = serve(warmup_requests=2, osl=60, num_requests=2)
    assert [r.output_tokens for r in long.requests(warmup=True)] == [33, 33]  # one prefill step, and 32 more
    assert [r.output_tokens for r in long.requests()] == [60, 60]


@pytest.mark.slow
def test_dataset_lengths_are_served(serve, tmp_path, capsys) -> None:
    lengths = [(3, 5), (40, 1), (17, 9)]
    data = tmp_path / "data.jsonl"
    lines = (json.dumps({"task_id": i, "input_ids": [5] * n, "output_tokens": m}) for i, (n, m) in enumerate(lengths))
    data.write_text("\n".join(lines))
    done = serve(dataset=str(data))
    assert [(r.input_tokens, r.output_tokens) for r in done.requests()] == lengths
    assert done.facts().requests == 3
    assert f"{data} has 3 requests, fewer than num_requests=9\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dataset": "none.jsonl"}, "cannot read the dataset none.jsonl: No such file or directory"),
        ({"num_requests": 0}, "workload.num_requests=0: must be at least 1"),
        ({"isl_spread": -1.0}, "workload.isl_spread=-1: must be at least 0"),
        ({"kv_fraction": 1.5}, "workload.kv_fraction=1.5: must be above 0 and at most 1"),
        ({"chunked_prefill": False, "isl": 33}, "a prompt of 33 tokens does not fit into a step of max_num_tokens=32"),
        ({"engine": "trtllm"}, "engine=trtllm: python -m llmb.serve is the native engine"),
        ({"profile": True, "gpu_metrics": True}, "does not run gpu_metrics=true"),
        ({"profile": True, "profile_start": 4, "profile_stop": 4}, "no step is profiled"),
        ({"gpus": 2, "tp": 2}, "needs 2 ranks but 1 started"),
    ],
)
def test_invalid_config_is_refused_before_the_engine_is_built(serve, capsys, monkeypatch, changes, reason: str) -> None:
    monkeypatch.setattr(serving_benchmark, "build_engine", lambda *_, **__: pytest.fail("built"))
    done = serve(**changes)
    assert (done.code, done.ended().status) == (1, "failed")
    assert reason in done.ended().reason
    assert capsys.readouterr() == ("", f"llmb.serve: {done.ended().reason}\n")


def test_too_small_cache_is_refused_with_advice(serve) -> None:
    reason = serve(kv_fraction=1e-9, isl=60).ended().reason
    assert reason.startswith("the KV cache of 16 tokens is too small for a request of 60+6: one request of 60+6 tokens")
    assert re.search(r"; KV_CACHE_FRACTION=0\.\d\d would do$", reason)


@pytest.mark.parametrize("where", ["build_engine", "BenchmarkPhase"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_reported_with_advice(serve, monkeypatch, capsys, where: str, error: Exception) -> None:
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(serving_benchmark, where, fail)
    done = serve()
    assert (done.code, done.ended().status) == (2, "oom")
    assert re.match(r"out of memory at a peak of [\d.]+ GiB of [\d.]+ GiB: ", done.ended().reason)
    assert "try KV_CACHE_FRACTION=0.03 or MAX_BATCH_SIZE=2 or MAX_NUM_TOKENS=16" in done.ended().reason
    assert capsys.readouterr().err == f"llmb.serve: {done.ended().reason}\n"


def test_unexpected_error_keeps_its_traceback(serve, monkeypatch, capsys) -> None:
    monkeypatch.setattr(serving_benchmark, "build_engine", lambda *_, **__: 1 / 0)
    done = serve()
    assert (done.code, done.ended().reason) == (2, "ZeroDivisionError: division by zero")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_profile_writes_trace(serve, capsys) -> None:
    done = serve(profile=True, profile_start=1, profile_stop=3)
    assert done.code == 0
    with gzip.open(done.folder / "profile" / "trace.rank0.json.gz") as file:
        assert any(event.get("cat") == "cpu_op" for event in json.load(file)["traceEvents"])
    late = serve(profile=True, profile_start=10**6, profile_stop=10**6 + 1)
    assert late.code == 0
    assert "profile: nothing was traced, the phase ended before step 1000000" in capsys.readouterr().out
