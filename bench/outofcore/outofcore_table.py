"""Parts `rows` and `batch` of `outofcore_gpu.py`, and `lora_gpu.py`: rows trained and laid beside references."""

import math
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from measure.device import release_memory

from llmb.errors import LaunchError
from llmb.offload.arena import Budgets
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel import flops, metrics
from llmb.perfmodel.hardware import GIB, TERA
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.plan_candidate import PlanResult
from llmb.perfmodel.offload.simulator import simulate
from llmb.perfmodel.offload.stream_timeline import StreamTimeline, write_timeline
from llmb.report.table import number
from llmb.report.timeline.profile_page import write_profile
from outofcore.outofcore_bench import Bench
from outofcore.outofcore_rows import BATCH_ROW, LARGE_BATCH, Row, ceiling_s, plan_line, plans_of, tiny_row
from outofcore.outofcore_training import Order, Trained, train

MEASURED_S = 30.0  # steps of a row count until there are enough or this is over
LARGE_BATCH_LOSS = 0.03  # that a small batch may cost


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A row's speed, and all that it is compared with, in tokens/s."""

    row: Row
    step_s: float
    tokens_per_s: float
    mfu: float | None
    hfu: float | None
    ceiling: float
    predicted: float

    @property
    def ratios(self) -> dict[str, float]:
        """Ratios of the speed to its references; published runs are named by host and device GiB."""
        row = self.row
        references: dict[str, float | None] = {f"published {where}": speed for where, speed in row.published.items()}
        references |= {"aim": row.aim, "floor": row.floor, "ceiling": self.ceiling, "predicted": self.predicted}
        return {name: self.tokens_per_s / speed for name, speed in references.items() if speed is not None}


def table(bench: Bench, rates: Rates, with_rows: bool, with_batch: bool) -> None:
    """Plan, lock memory, train row by row; a row that fails is named, and the others go on."""
    rows = bench.rows if with_rows else ()
    small = tiny_row(BATCH_ROW) if bench.tiny else BATCH_ROW
    large = replace(small, gbs=LARGE_BATCH * small.gbs // BATCH_ROW.gbs)
    pair = (small, large) if with_batch else ()
    began = time.perf_counter()
    result = plans_of(dict.fromkeys((*rows, *pair)), bench.models, rates)
    bench.print_heading(f"{len(result)} plans made in {time.perf_counter() - began:.1f} s")
    fitting = {row: plan for row, plan in result.items() if isinstance(plan, PlanResult)}
    for row, why in result.items():
        if isinstance(why, str):
            _failed(bench, row, why)
    if not fitting:
        return
    slab = bench.slab(max(sum(plan.host_bytes.values()) for plan in fitting.values()))
    done: dict[Row, Outcome] = {}
    for row, plan in fitting.items():
        outcome = _measured(bench, row, plan, rates, slab)
        if outcome is not None:
            done[row] = outcome
    _say_rows(bench, [outcome for row, outcome in done.items() if row in rows])
    if with_batch and all(row in done for row in pair):
        _say_batch(bench, *(done[row] for row in pair))


def _measured(bench: Bench, row: Row, result: PlanResult, rates: Rates, slab: HostSlab) -> Outcome | None:
    bench.print_heading(f"{row.title}, {row.gbs} sequences a step")
    print(f"  plan: {plan_line(bench.models[row.size], result)}", flush=True)
    try:
        trained = train(bench.models[row.size], result, _order(bench, row, result, rates), bench.device, slab)
    except Exception as error:  # out of memory, a kernel that fails: the other rows do not depend on it
        traceback.print_exc()
        _failed(bench, row, f"{type(error).__name__}: {error}".splitlines()[0])
        trained = None
    finally:
        release_memory(bench.device)
    if trained is None:
        return None
    outcome = _outcome(bench, row, result, trained, rates)
    _say_row(outcome, result, trained)
    bench.record("rows", _record(outcome, result, trained))
    if bench.profile is not None:
        _profile(bench.profile, bench, outcome, result, trained, rates)
        bench.profile = None
    return outcome


def _order(bench: Bench, row: Row, result: PlanResult, rates: Rates) -> Order:
    # The first step compiles kernels to its very end, so Python is not ahead when the second begins.
    is_first = not any("losses" in earlier for earlier in bench.results.get("rows", []))
    return Order(
        budgets=Budgets(host_gib=row.host_gib, device_gib=row.device_gib),
        warm_up=row.warm_up + is_first,
        steps=max(1, min(bench.steps, int(MEASURED_S / result.simulation.step_s))),
        watch_all=bench.profile is not None,
        link_gbs=(rates.link_in_gbs, rates.link_out_gbs),
        peak_tflops=None if (peak := bench.peak("bf16")) is None else peak / TERA,
    )


def _outcome(bench: Bench, row: Row, result: PlanResult, trained: Trained, rates: Rates) -> Outcome:
    model, step_s, tokens = bench.models[row.size], trained.step_s, result.plan.step_tokens
    useful = row.gbs * flops.train_flops_per_sequence(model, row.seqlen, "causal")
    if row.lora is not None:
        useful -= row.gbs * flops.frozen_flops_per_sequence(model, row.lora, row.seqlen)
    return Outcome(
        row=row,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        mfu=metrics.mfu(metrics.tflops_per_gpu(useful, step_s, 1), bench.peak("bf16")),
        hfu=metrics.hfu(result.simulation.hardware_flops, step_s, 1, bench.peak("bf16")),
        ceiling=tokens / ceiling_s(model, result.plan, rates),
        predicted=tokens / result.simulation.step_s,
    )


def _say_row(outcome: Outcome, result: PlanResult, trained: Trained) -> None:
    row = outcome.row
    warm = "none" if trained.warm_up_s is None else f"{trained.warm_up_s:.4g} s"
    used = {"host": (trained.host_bytes, row.host_gib), "device": (trained.device_bytes, row.device_gib)}
    memory = ", ".join(f"{side} {size / GIB:.4g} of {may:.4g} GiB" for side, (size, may) in used.items())
    if trained.driver_bytes is not None:
        memory += f" ({trained.driver_bytes / GIB:.4g} with the driver's own)"
    print(
        f"  {number(outcome.tokens_per_s)} tokens/s, {number(outcome.step_s)} s a step, MFU {_percent(outcome.mfu)}, "
        f"HFU {_percent(outcome.hfu)}\n"
        f"  ratios: {', '.join(f'{name} {ratio:.3f}' for name, ratio in outcome.ratios.items())}\n"
        f"  steps: {_listed(trained.seconds)} s, warm-up {warm}, opening {trained.opening_s:.4g} s\n"
        f"  computation waited {_percent(trained.waited)} of the last step, expected {_percent(_waits(result))}; "
        f"copies in {_percent(trained.link['inbound'])}, out {_percent(trained.link['outbound'])}\n"
        f"  memory: {memory}\n"
        f"  losses: {_listed(trained.losses)}{'' if trained.sound else '  NOT what training gives'}",
        flush=True,
    )


def _say_rows(bench: Bench, done: list[Outcome]) -> None:
    rows = []
    for outcome in done:
        row, ratios = outcome.row, outcome.ratios
        published = [f"{speed:,.0f} ({where})" for where, speed in row.published.items()]
        compared = [f"{ratios[f'published {where}']:.3f}" for where in row.published]
        goals = (row.aim and float(row.aim), ratios.get("aim"), row.floor and float(row.floor))
        speeds = (*goals, outcome.ceiling, ratios["ceiling"], outcome.predicted)
        shares = (_percent(outcome.mfu), _percent(outcome.hfu))
        rows.append((row.title, row.gbs, outcome.tokens_per_s, outcome.step_s, *shares, ", ".join(published) or None,
                     ", ".join(compared) or None, *speeds, ratios["predicted"]))  # fmt: skip
    if rows:
        bench.print_table(
            "Out-of-core training, tokens/s of whole steps",
            ("sequence/host/device", "gbs", "tokens/s", "s", "MFU", "HFU", "published", "ratio", "aim", "ratio",
             "floor", "ceiling", "ratio", "predicted", "ratio"),
            rows,
            "published: on an H100, host/device GiB there; 8 bytes a weight as here, rounded to nearest",
            "ceiling: products and attention at the rates above, nothing computed again, nothing waited for",
        )  # fmt: skip


def _say_batch(bench: Bench, small: Outcome, large: Outcome) -> None:
    slower = 1 - small.tokens_per_s / large.tokens_per_s
    bench.print_table(
        f"{small.row.title}: a small global batch",
        ("sequences a step", "tokens/s"),
        [(outcome.row.gbs, outcome.tokens_per_s) for outcome in (small, large)],
        f"slower by {_percent(slower)}; at most {_percent(LARGE_BATCH_LOSS)} is the aim",
    )
    speeds = {str(outcome.row.gbs): outcome.tokens_per_s for outcome in (small, large)}
    bench.record("batch", {"row": small.row.title, "tokens_per_s": speeds, "slower": slower, "aim": LARGE_BATCH_LOSS})


def _record(outcome: Outcome, result: PlanResult, trained: Trained) -> dict[str, Any]:
    """Return the record of a row; its streams are in the profile."""
    seen = {name: value for name, value in vars(trained).items() if name != "streams"}
    seen["losses"] = [loss if math.isfinite(loss) else None for loss in trained.losses]  # JSON has no NaN
    figures = {name: value for name, value in vars(outcome).items() if name != "row"}
    expected = {name: value for name, value in vars(result.simulation).items() if name != "events"}
    return {
        "title": outcome.row.title, "row": asdict(outcome.row), **figures, "ratios": outcome.ratios, **seen,
        "plan": asdict(result.plan), "expected": expected, "expected_waits": _waits(result),
    }  # fmt: skip


def _failed(bench: Bench, row: Row, why: str) -> None:
    print(f"  {row.title}, {row.gbs} sequences a step: FAILED: {why}", file=sys.stderr, flush=True)
    bench.record("rows", {"title": row.title, "row": asdict(row), "error": why})


def _profile(folder: Path, bench: Bench, outcome: Outcome, result: PlanResult, trained: Trained, rates: Rates) -> None:
    """Write measured and predicted streams as `llmb-run submit -p` does."""
    model = bench.models[outcome.row.size]
    expected = StreamTimeline(
        source="predicted",
        events=simulate(model, result.plan, rates, with_events=True).events,
        link_gbs=trained.streams.link_gbs,
        peak_tflops=trained.streams.peak_tflops,
    )
    figures = [
        ("measured", f"{number(outcome.tokens_per_s)} tokens/s, {number(outcome.step_s)} s a step"),
        ("predicted", f"{number(result.simulation.step_s)} s a step"),
        ("machine", bench.machine),
    ]
    try:
        page = write_profile(folder, trained.streams, expected, f"{model.name}, {outcome.row.title}", figures)
        write_timeline(folder / "lanes.json", trained.streams)
    except (LaunchError, OSError) as error:
        print(f"  no profile: {error}", file=sys.stderr)
        return
    print(f"  profile: {page}", flush=True)


def _waits(result: PlanResult) -> float:
    return 1 - result.simulation.compute_s / result.simulation.step_s


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
