"""bench/train_gpu.py: ceilings and lower bounds by hand, trace breakdown, rows that fail, the program with --tiny."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from llmb.perfmodel import block_costs, flops

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
rows, calls, bounds, trace, table, bench_of, peers = (
    import_module(f"training.train_{name}")
    for name in ("rows", "calls", "lower_bounds", "trace", "table", "bench", "peers")
)
ENVIRONMENT = {"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}
LLAMA = rows.ROWS[0]


def bench(tmp_path: Path, *some, parts=("rows",)):
    return bench_of.Bench(
        device=torch.device("cpu"), rows=some, parts=frozenset(parts), steps=1, settings=(), tiny=True,
        json=tmp_path / "results.json",
    )  # fmt: skip


def at_one_rate(config, rate: float = 1e12) -> dict:
    """Every call at as many FLOP/s; what moves bytes takes no time."""
    return {call: getattr(call, "flops", 0.0) / rate for call in calls.calls_of(config)}


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.title)
def test_the_ceiling_is_every_flop_once(row):
    """At one rate it is the FLOPs over that rate, whatever is computed again; a scan counts by its bytes."""
    config = rows.configuration(row, "h200", [])
    work, model = config.workload, config.model
    scanned = 6 * work.seqlen * sum(count * block.scan_macs for _, count, block in block_costs.block_stack(model))
    once = work.gbs * (flops.hardware_flops_per_sequence(model, work.seqlen, "causal", 0) - scanned)
    assert calls.step_seconds(config, at_one_rate(config)) == pytest.approx(once / 1e12)


@pytest.mark.slow
def test_the_calls_of_llama_8b_by_hand():
    config = rows.configuration(LLAMA, "h200", ["mbs=1"])
    actual = calls.calls_of(config)
    layer = {(8192, 6144, 4096), (8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336)}
    for way in calls.WAYS:
        assert {(c.rows, c.outputs, c.inputs) for c in actual if getattr(c, "way", None) == way} == {
            *layer, (8192, 128256, 4096),
        }  # fmt: skip
    assert actual[calls.GemmCall("forward", "bf16", 8192, 6144, 4096)] == 32
    assert actual[calls.GemmCall("forward", "bf16", 8192, 128256, 4096)] == 1
    assert actual[calls.AttentionCall(True, 1, 8192, 32, 8, 128, 128)] == 32


def test_layers_with_a_window_are_calls_of_their_own():
    """Half of Gemma 2's layers; kernels without a window are timed on a sequence with as many pairs."""
    (row,) = (row for row in rows.ROWS if row.title == "gemma2 9b 8k bf16")
    actual = calls.calls_of(rows.configuration(row, "h200", []))
    attention = {call: count for call, count in actual.items() if isinstance(call, calls.AttentionCall)}
    shape = (1, 8192, 16, 8, 256, 256)
    assert attention == {
        calls.AttentionCall(backward, *shape, window): 21 for backward in (False, True) for window in (None, 4096)
    }
    full, windowed = (calls.AttentionCall(False, *shape, window) for window in (None, 4096))
    assert windowed.flops == pytest.approx(0.75 * full.flops)
    assert (full.causal_tokens, windowed.causal_tokens) == (8192, 7104)
    assert windowed.causal_tokens**2 / 8192**2 == pytest.approx(0.75, rel=0.01)


def test_only_the_stack_is_in_fp8():
    config = rows.configuration(rows.ROWS[1], "h200", ["mbs=1"])
    products = [call for call in calls.calls_of(config) if isinstance(call, calls.GemmCall)]
    assert {call.dtype for call in products if call.outputs == 128256} == {"bf16"}
    assert {call.dtype for call in products if call.outputs != 128256} == {"fp8"}


def test_lower_bounds_by_hand():
    config = rows.configuration(LLAMA, "h200", ["mbs=1"])
    actual = bounds.lower_bounds(config, at_one_rate(config), memory=1e12)
    tokens = config.workload.gbs * 8192
    norms, rotations, activations = 6 * 65 * 4096, 32 * 4 * 40 * 128, 32 * 8 * 14336
    assert actual[trace.SMALL] == pytest.approx(2 * tokens * (norms + rotations + activations) / 1e12)
    assert actual[trace.LOSS] == pytest.approx(4 * tokens * 128256 / 1e12)
    assert actual[trace.ADDING] == 0
    pair = actual[trace.PRODUCTS] + actual[trace.ATTENTION]
    assert pair == pytest.approx(calls.step_seconds(config, at_one_rate(config)))


def test_gemm_without_a_measured_rate_has_the_mean_of_its_dtype():
    seconds = {calls.GemmCall("forward", "bf16", 8, 4, 2): 1.0, calls.GemmCall("input gradient", "bf16", 8, 4, 2): 3.0}
    assert bounds.gemm_lower_bound(trace.Size("bf16", (2, 4, 8)), 5, seconds) == 5.0
    assert bounds.gemm_lower_bound(trace.Size("bf16", (2, 8, 8)), 1, seconds) == pytest.approx(256 / (256 / 4))
    assert bounds.gemm_lower_bound(trace.Size("fp8", (2, 4, 8)), 1, seconds) is None
    assert bounds.gemm_lower_bound(trace.Size("bf16", ()), 1, seconds) is None


def kernel(name: str, start: float, length: float, by: int | None = None) -> dict:
    arguments = {} if by is None else {"External id": by}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": arguments}


def operation(number: int, name: str, dims=(), types=()) -> dict:
    arguments = {"External id": number, "Input Dims": list(dims), "Input type": list(types)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0.0, "dur": 1.0, "args": arguments}


def test_breakdown_of_a_trace():
    """Two steps of a GPU: overlaps are counted once, gaps are idle, parts of one product are one call."""
    two = ("c10::BFloat16", "c10::BFloat16")
    events = [
        operation(1, "aten::mm", [[8, 4], [4, 2]], two),
        operation(2, "aten::add_", [[8, 2], [8, 2]], two),
        operation(3, "aten::_scaled_mm", [[16, 4], [4, 2], [], []], ["c10::Float8_e4m3fn"] * 2 + ["float"] * 2),
        operation(4, "aten::addmm_", [[8, 2], [8, 4], [4, 2]], ["float", *two]),
        kernel("nvjet_tst", 0.0, 40.0, by=1),
        kernel("splitKreduce", 40.0, 10.0, by=1),
        kernel("elementwise_kernel", 45.0, 15.0, by=2),  # from 50 on alone
        kernel("nvjet_qqtst", 70.0, 20.0, by=3),
        kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 90.0, 5.0),
        kernel("_adam_update", 95.0, 3.0),
        kernel("nvjet_tst", 98.0, 2.0, by=4),
    ]
    actual = trace.split_trace(events, on_gpu=True, steps=2)
    assert actual.span == pytest.approx(50e-6)
    assert actual.idle == pytest.approx(5e-6)
    assert actual.gaps == [("aten::_scaled_mm nvjet_qqtst", pytest.approx(5e-6))]
    assert actual.kinds == pytest.approx(
        {trace.PRODUCTS: 36e-6, trace.ADDING: 5e-6, trace.ATTENTION: 2.5e-6, trace.OPTIMIZER: 1.5e-6}
    )
    assert actual.products == {
        trace.Size("bf16", (2, 4, 8)): (1, pytest.approx(26e-6)),
        trace.Size("fp8", (2, 4, 16)): (0, pytest.approx(10e-6)),
    }


@pytest.mark.parametrize(
    ("operation", "name", "kind"),
    [
        ("aten::_scaled_dot_product_cudnn_attention_backward", "cudnn_generated_bprop", trace.ATTENTION),
        ("aten::_scaled_grouped_mm", "cutlass_device_kernel", trace.PRODUCTS),
        ("_Fp8LinearBackward", "_quantize_fp8", trace.QUANTISING),
        ("_Fp8LinearBackward", "nvjet_sm90_qqtst", trace.PRODUCTS),
        ("_GatedMlpBackward", "_glu_backward_fp8", trace.SMALL),
        ("aten::linalg_vector_norm", "reduce_kernel", trace.QUANTISING),
        ("_GatedNorm", "_gated_norm", trace.SMALL),
        ("_CausalConv", "_forward_kernel", trace.SCAN),
        ("", "_rms_norm_backward", trace.SMALL),
        ("", "_apply_rope", trace.SMALL),
        ("RopeFunctionBackward", "_mla_rope", trace.SMALL),
        ("_ActivationBackward", "_activation_backward", trace.SMALL),
        ("", "_cross_entropy_grad", trace.LOSS),
        ("", "score_grads_kernel", trace.SCAN),
        ("aten::_foreach_norm", "multi_tensor_apply_kernel", trace.OPTIMIZER),
        ("aten::add_", "vectorized_elementwise_kernel", trace.ADDING),
        ("aten::copy_", "unrolled_elementwise_kernel", trace.COPIES),
        ("", "Memcpy DtoD", trace.COPIES),
        ("", "something_new", trace.OTHER),
    ],
)
def test_classes_of_kernels(operation, name, kind):
    assert trace.class_of(trace.Launched(name, operation, (), (), 0)) == kind


def test_verdicts():
    outcome = table.Outcome(
        row=LLAMA, config=None, trained=None, tokens_per_s=12_100.0, tflops=None, mfu=None, ceiling=12_400.0,
        torch_ceiling=12_100.0,
    )  # fmt: skip
    assert outcome.verdict == "aim"
    assert outcome.torch_share == 1.0
    assert replace(outcome, tokens_per_s=11_700.0).verdict == "floor"
    assert replace(outcome, tokens_per_s=11_500.0).verdict == "short"
    assert replace(outcome, row=rows.without_aims(LLAMA)).verdict is None


def test_mean_of_the_times_before_and_after_a_row_counts(tmp_path, monkeypatch):
    running = bench(tmp_path, LLAMA)
    config = running.configuration(LLAMA)
    for seconds in (1.0, 3.0):
        monkeypatch.setattr("training.train_bench.measured", lambda calls, *_, each=seconds: dict.fromkeys(calls, each))
        running.remeasure(config) if running.seconds else running.measure(config)
    assert set(running.seconds.values()) == {2.0}


def test_failed_row_is_named_and_the_next_one_runs(tmp_path, capsys):
    running = bench(tmp_path, LLAMA)
    config = running.configuration(LLAMA)
    wrong = replace(config, workload=replace(config.workload, recompute_layers=99))
    order = running.order(LLAMA, profile=False)
    assert table.measured(running, LLAMA, wrong, order) is None
    assert "FAILED: ConfigError: recompute_layers=99" in capsys.readouterr().err
    assert table.measured(running, LLAMA, config, order).tokens_per_s > 0
    failed, done = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert "recompute_layers=99" in failed["error"]
    assert done["ratio"] == pytest.approx(done["tokens_per_s"] / done["ceiling"])


def test_every_peer_has_a_row():
    assert {peer.row for peer in peers.PEERS} <= {row.title for row in rows.ROWS}
    assert len({row.title for row in rows.ROWS}) == len(rows.ROWS)


def program(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCH / "train_gpu.py", "--tiny", *arguments], capture_output=True, text=True,
        cwd=BENCH.parent, env=ENVIRONMENT,
    )  # fmt: skip


@pytest.mark.slow
def test_unknown_names_are_one_line():
    for options, output in (("--only=speed", "parts are: rates, rows"), ("--row=gpt", "rows are: llama 8b 8k bf16")):
        done = program(options)
        assert done.returncode == 2
        assert output in done.stderr.splitlines()[-1]
    done = program("--only=rows", "--set=layer=3")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "layer" in done.stderr


@pytest.mark.nightly
def test_a_part_of_the_program_runs_on_any_machine(tmp_path):
    file = tmp_path / "results.json"
    done = program("--only=rates,rows,kernels,memory", "--row=llama 8b 8k bf16", "--steps=1", f"--json={file}")
    assert done.returncode == 0, done.stderr
    for output in ("Rates of llama", "Rows, whole optimizer steps", "time of a step", "by size", "within 78 GiB"):
        assert output in done.stdout
    actual = json.loads(file.read_text())
    (row,), (apart,), (small,) = actual["rows"], actual["kernels"], actual["memory"]
    assert row["title"] == small["title"] == apart["title"] == "llama 8b 8k bf16"
    assert len(row["seconds"]) == 1
    assert sum(apart["kinds_s"].values()) + apart["idle_s"] == pytest.approx(apart["span_s"])


@pytest.mark.nightly
def test_the_whole_program_runs_on_any_machine(tmp_path):
    file = tmp_path / "results.json"
    done = program(f"--json={file}")
    assert done.returncode == 0, done.stderr
    actual = json.loads(file.read_text())
    assert [row["title"] for row in actual["rows"]] == [row.title for row in rows.ROWS]
    assert all(row["tokens_per_s"] > 0 for row in actual["rows"])
    assert len(actual["peers"]) == len(peers.PEERS)
    assert all("skipped" in peer or peer["tokens_per_s"] > 0 for peer in actual["peers"])


def test_ceilings_with_and_without_other_libraries_are_kept_apart(tmp_path, monkeypatch):
    running = bench(tmp_path, LLAMA)
    config = running.configuration(LLAMA)
    monkeypatch.setattr("training.train_bench.has_flash4", lambda _device: True)
    monkeypatch.setattr(
        "training.train_bench.measured", lambda calls, *arguments: dict.fromkeys(calls, 2.0 if arguments[-1] else 1.0)
    )
    assert running.ceiling(config) == 2 * running.ceiling(config, torch_only=True)
    running.remeasure(config)
    assert set(running.seconds.values()) == {1.0}
    assert set(running.torch_seconds.values()) == {2.0}
