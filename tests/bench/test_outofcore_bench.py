"""bench/outofcore_gpu.py: its rows and ceilings by hand, rows that fail, and the whole program in a tiny form."""

import json
import math
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from llmb.config.offload_plan import Plan
from llmb.errors import ConfigError
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel import flops
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.machine_rates import H200, NOMINAL_CPU, Rates

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
rows = import_module("outofcore.outofcore_rows")
table = import_module("outofcore.outofcore_table")
peers = import_module("outofcore.outofcore_peers")
bench_of = import_module("outofcore.outofcore_bench")
ENVIRONMENT = {"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}


def bench(tmp_path: Path, *some) -> object:
    return bench_of.Bench(
        device=torch.device("cpu"), models=rows.tiny_models(), rows=some, steps=1, tiny=True,
        json=tmp_path / "results.json", profile=None,
    )  # fmt: skip


def test_every_row_has_a_tiny_one_and_every_peer_a_row():
    titles = [row.title for row in rows.ROWS]
    assert len(set(titles)) == len(titles)
    assert set(titles) == set(rows.TINY)
    assert {peer.row for peer in peers.PEERS} <= set(titles)
    for peer in peers.PEERS:
        row = next(row for row in rows.ROWS if row.title == peer.row)
        assert (peer.seqlen, peer.device_gib) == (row.seqlen, row.device_gib)


@pytest.mark.slow
def test_the_ceiling_is_every_flop_once():
    """At one rate for everything it is the FLOPs over that rate, whatever the plan computes again."""
    item = Rates(
        gpu="cpu", matmul_tflops=1, attention_forward_tflops=1, attention_backward_tflops=1, square_tokens=1,
        past_attention_forward_tflops=1, past_attention_backward_tflops=1, memory_gbs=1e-9, link_in_gbs=1,
        link_out_gbs=1, link_both_gbs=1, source="by hand",
    )  # fmt: skip
    for row in map(rows.tiny_row, rows.ROWS):
        model = rows.tiny_models()[row.size]
        plan = rows.planned(model, row, NOMINAL_CPU).plan
        once = row.gbs * flops.hardware_flops_per_sequence(model, row.seqlen, "causal", 0)
        assert rows.ceiling_s(model, plan, item) == pytest.approx(once / 1e12)
        assert rows.ceiling_s(model, replace(plan, levels="I" * len(plan.levels)), item) == pytest.approx(once / 1e12)


def test_the_ceiling_of_8_192_tokens_by_hand():
    plan = Plan(
        dtype="bf16", seqlen=8192, gbs=16, chunk_tokens=16384, seqs_per_group=2, groups_per_round=1, loss_tokens=2048,
        update="stochastic", update_at="backward", resident_params=0, resident_grads=0, resident_states=0,
        param_blocks=5, grad_blocks=5, state_blocks=2, inp_slots=4, kv_slots=3, attn_slots=3, rest_slots=0,
        levels="A" * 32,
    )  # fmt: skip
    products = 6 * (32 * 218_103_808 + 4096 * 128_256) / 685e12
    attention = 32 * 4 * 4096 * 4096 * (1 / 513e12 + 2.5 / 427e12)  # half of 8,192 keys, heads of 4,096 in all
    assert rows.ceiling_s(rows.models()["8b"], plan, H200) / (16 * 8192) == pytest.approx(products + attention)


def test_ratios():
    row = replace(rows.ROWS[-1], published={"160/40": 1000.0, "256/78": 4000.0}, aim=None, floor=500.0)
    outcome = table.Outcome(
        row=row, step_s=1.0, tokens_per_s=2000.0, mfu=None, hfu=None, ceiling=2500.0, predicted=1600.0
    )
    assert outcome.ratios == pytest.approx(
        {"published 160/40": 2.0, "published 256/78": 0.5, "floor": 4.0, "ceiling": 0.8, "predicted": 1.25}
    )


def test_plan_that_does_not_fit_gives_a_message():
    making: Future = Future()
    making.set_exception(ConfigError("does not fit"))
    assert rows._result_or_error(making) == "does not fit"


def test_failed_row_is_named_and_the_next_one_runs(tmp_path, capsys):
    row = rows.tiny_row(rows.BATCH_ROW)
    plan = rows.planned(rows.tiny_models()[row.size], row, NOMINAL_CPU)
    slab = HostSlab(sum(plan.host_bytes.values()), torch.device("cpu"))
    running = bench(tmp_path, row)
    assert table._measured(running, replace(row, device_gib=row.device_gib / 4), plan, NOMINAL_CPU, slab) is None
    assert "FAILED: ConfigError: the plan needs" in capsys.readouterr().err
    assert table._measured(running, row, plan, NOMINAL_CPU, slab).tokens_per_s > 0
    failed, done = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert "more than device_gib" in failed["error"]
    assert done["host_bytes"] == slab.size
    assert done["device_bytes"] < row.device_gib * GIB


def test_unknown_names_are_one_line():
    for inputs, output in (("--only=speed", "parts are: rates, rows"), ("--row=9000/1/1", "rows are: 8192/75/78")):
        done = subprocess.run(
            [sys.executable, BENCH / "outofcore_gpu.py", "--tiny", inputs], capture_output=True, text=True,
            env=ENVIRONMENT,
        )  # fmt: skip
        assert done.returncode == 2
        assert output in done.stderr.splitlines()[-1]


@pytest.mark.nightly
def test_lora_program_runs_on_any_machine(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCH / "lora_gpu.py", "--tiny", "--json", tmp_path / "json"],
        capture_output=True, text=True, cwd=BENCH.parent, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resident, streaming = json.loads((tmp_path / "json").read_text())["rows"]
    assert resident["expected"]["inbound_bytes"] == 0 < streaming["expected"]["inbound_bytes"]
    assert resident["losses"][:3] == streaming["losses"]  # which has one step less to warm up
    for row in (resident, streaming):
        assert row["sound"]
        assert row["expected"]["outbound_bytes"] == 0
        assert row["device_bytes"] <= row["row"]["device_gib"] * GIB


@pytest.mark.nightly
def test_disk_program_runs_on_any_machine(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCH / "outofcore_disk.py", "--tiny", "--disk-path", tmp_path, "--json", tmp_path / "json"],
        capture_output=True, text=True, cwd=BENCH.parent, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "losses: the same in all rows, bit for bit" in done.stdout
    actual = json.loads((tmp_path / "json").read_text())
    on_disk = [(row["plan"]["disk_params"], row["plan"]["disk_states"]) for row in actual["rows"]]
    assert on_disk[0] == (0, 0)
    assert on_disk[1][0] == 0 < on_disk[1][1]
    assert on_disk[2][0] > 0
    for row in actual["rows"][1:]:
        assert row["read_bytes"] > 0
        assert row["host_bytes"] <= row["row"]["host_gib"] * GIB
        assert row["ratio_of_ceiling"] > 0


@pytest.mark.nightly
def test_outofcore_program_runs_on_any_machine(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCH / "outofcore_gpu.py", "--tiny", "--json", tmp_path / "results.json", "--profile"],
        capture_output=True, text=True, cwd=BENCH.parent, env=ENVIRONMENT | {"OUT": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for output in ("Rates of this machine", "plans made in", "pinned in", "tokens/s of whole steps", "a small global",
                 "Peers, in the device memory", "seconds in all"):  # fmt: skip
        assert output in done.stdout
    actual = json.loads((tmp_path / "results.json").read_text())
    assert [row["title"] for row in actual["rows"]] == [
        *(f"tiny {title}" for title in rows.TINY), f"tiny {rows.BATCH_ROW.title}",
    ]  # fmt: skip
    for row in actual["rows"]:
        assert row["expected"]["inbound_bytes"] > 0  # it streams
        assert row["sound"]
        assert math.isfinite(sum(row["losses"]))
        assert row["device_bytes"] <= row["row"]["device_gib"] * GIB
        assert row["host_bytes"] <= row["row"]["host_gib"] * GIB
        assert 0 <= row["waited"] < 1
    longest = actual["rows"][len(rows.TINY) - 1]
    assert longest["warm_up_s"] is None
    assert actual["batch"][0]["tokens_per_s"].keys() == {"4", "17"}
    (peer,) = actual["peer"]
    assert "skipped" in peer or peer["tokens_per_s"] > 0
    assert (tmp_path / "profile" / "lanes.json").stat().st_size > 1000
    assert "predicted" in (tmp_path / "profile" / "profile.html").read_text()
