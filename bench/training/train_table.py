"""Parts `rates`, `rows` and `memory` of `train_gpu.py`: each row trained, beside its ceiling, its aim and its floor."""

import sys
import traceback
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import LlmbError
from llmb.perfmodel import flops, metrics
from llmb.perfmodel.hardware import GIB, TERA
from llmb.runtime.run_ending import OutOfMemory
from training.train_bench import Bench
from training.train_calls import GemmCall, calls_of
from training.train_kernels import kernels
from training.train_rows import MEMORY_ROW, Row, within_memory, work_of
from training.train_run import Order, Trained, trained

SMALL_GIB = 78.0  # that 80 of an H100 leave beside its driver
MEMORY_LOSS = 0.06  # of speed that fitting into it may cost
HEADER = (
    "row", "tokens/s", "aim", "floor", "ceiling", "ratio", "of torch's", "aim ratio", "floor ratio", "TFLOP/s", "MFU %",
    "GiB", "steps", "reached",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A row's speed, in tokens/s, and what it is compared with."""

    row: Row
    config: RunConfig
    trained: Trained
    tokens_per_s: float
    tflops: float | None
    mfu: float | None
    ceiling: float
    torch_ceiling: float  # without libraries that torch does not bring along

    @property
    def share(self) -> float:
        """Fraction of the ceiling."""
        return self.tokens_per_s / self.ceiling

    @property
    def torch_share(self) -> float:
        """Fraction of the ceiling of torch's own libraries."""
        return self.tokens_per_s / self.torch_ceiling

    @property
    def verdict(self) -> str | None:
        """The level that is reached in full, "aim" or "floor", else "short"; None if the row has no aims."""
        row = self.row
        if row.aim is row.aim_share is None:
            return None
        aims = ((row.aim, self.tokens_per_s), (row.aim_share, self.share))
        floors = ((row.floor, self.tokens_per_s), (row.floor_share, self.share))
        if all(reached >= goal for goal, reached in aims if goal is not None):
            return "aim"
        return "floor" if all(reached >= goal for goal, reached in floors if goal is not None) else "short"


def rates(bench: Bench) -> None:
    """Measure all calls of all rows, for the following parts."""
    for row in bench.rows:
        config = bench.configuration(row)
        try:
            new = bench.measure(config)
        except RuntimeError as error:  # a call that no library takes: the other rows have other calls
            _failed(bench, "rates", row, error)
            continue
        lines = []
        for call in new:
            seconds = bench.seconds[call]
            lines.append((str(call), 1e6 * seconds, call.flops / seconds / TERA))
            timing = {
                "call": str(call),
                "product": isinstance(call, GemmCall),
                "seconds": seconds,
                "flops": call.flops,
            }
            bench.record("rates", {"row": row.title} | timing)
        ceiling = bench.ceiling(config)
        bench.print_table(
            f"Rates of {row.title}: {len(lines)} calls not timed before",
            ("call", "us", "TFLOP/s"),
            lines,
            f"ceiling {ceiling:,.0f} tokens/s: the best library time of each of its {len(calls_of(config))} calls",
        )
    print(f"  bandwidth of a copy, bytes read and written: {bench.memory / 1e12:.3f} TB/s", flush=True)
    bench.record("rates", {"bytes_per_s": bench.memory})


def rows(bench: Bench) -> None:
    """Row by row; one that fails is named, and the others go on. Without part `rows` those that are taken apart.

    Part `memory` comes behind the row that it is compared with.
    """
    done = []
    for row in bench.rows:
        apart = "kernels" in bench.parts and (row.kernels or len(bench.rows) == 1)
        if "rows" not in bench.parts and not apart:
            continue
        outcome = measured(bench, row, bench.configuration(row), bench.order(row, profile=apart))
        if outcome is None:
            continue
        if apart:
            kernels(bench, row, outcome.config, outcome.trained)
        done.append(replace(outcome, trained=replace(outcome.trained, trace=[])))  # a trace is large
        if row.title == MEMORY_ROW.title and "memory" in bench.parts:
            memory(bench)
    if done and "rows" in bench.parts:
        _print_table(bench, done)


def memory(bench: Bench) -> None:
    """Train within the memory of a smaller GPU, by an out-of-core plan."""
    row = MEMORY_ROW
    whole: dict[str, Any] = next(
        (outcome for outcome in bench.results.get("rows", []) if outcome["title"] == row.title), {}
    )
    config = within_memory(SMALL_GIB, bench.gpu, bench.tiny)
    work = config.workload
    assert isinstance(work, OutOfCore)
    bench.print_heading(
        f"{row.title} within {work.device_gib:g} GiB of the device and {work.host_gib:g} GiB of the host"
    )
    order = replace(bench.order(row, profile=False), steps=3, seconds=15.0)
    try:
        done = trained(config, order, bench.device)
    except Exception as error:
        _failed(bench, "memory", row, error)
        return
    finally:
        bench.clear()
    assert work.plan is not None
    speed, before = work.plan.gbs * work.seqlen / done.step_s, whole.get("tokens_per_s")
    lost = 1 - speed / before if before else None
    bench.record("memory", {"title": row.title, "work": asdict(work), "tokens_per_s": speed, "seconds": done.seconds,
                          "memory_bytes": done.memory_bytes, "lost": lost})  # fmt: skip
    bench.print_table(
        f"{row.title} within {SMALL_GIB:g} GiB",
        ("tokens/s", "with all memory", "lost", "aim", "GiB"),
        [(speed, before, lost, MEMORY_LOSS, done.memory_bytes / GIB)],
    )


def measured(bench: Bench, row: Row, config: RunConfig, order: Order) -> Outcome | None:
    """One row trained and kept, or named with what went wrong."""
    work = work_of(config)
    altered = f"; {config.proxy}" if config.proxy else ""
    bench.print_heading(f"{row.title}: {work.gbs} x {work.seqlen} tokens a step, {work.mbs} at once{altered}")
    try:
        ceiling_before = bench.ceiling(config)
        bench.ceiling(config, torch_only=True)
        done = trained(config, order, bench.device)
        bench.clear()
        bench.remeasure(config)
    except Exception as error:  # out of memory, a kernel that fails: the other rows do not depend on it
        if not isinstance(error, OutOfMemory | LlmbError):  # which say all there is to say
            traceback.print_exc()
        _failed(bench, "rows", row, error)
        done = None
    finally:
        bench.clear()
    if done is None:
        return None
    step_flops = work.gbs * flops.train_flops_per_sequence(config.model, work.seqlen, "causal")
    tflops = metrics.tflops_per_gpu(step_flops, done.step_s, 1)
    outcome = Outcome(
        row=row, config=config, trained=done, tokens_per_s=work.gbs * work.seqlen / done.step_s, tflops=tflops,
        mfu=metrics.mfu(tflops, bench.peak(row.dtype)), ceiling=bench.ceiling(config),
        torch_ceiling=bench.ceiling(config, torch_only=True),
    )  # fmt: skip
    steps = f"median of {len(done.seconds)} steps, {min(done.seconds):.3f} to {max(done.seconds):.3f} s"
    print(f"  {outcome.tokens_per_s:,.0f} tokens/s, {outcome.share:.3f} of the ceiling; {steps}")
    print(f"  ceiling {outcome.ceiling:,.0f}, before the row {ceiling_before:,.0f} tokens/s", flush=True)
    if bench.has_other_libraries:
        print(
            f"  {outcome.torch_share:.3f} of torch's own libraries, {outcome.torch_ceiling:,.0f} tokens/s", flush=True
        )
    bench.record("rows", _record(outcome))
    return outcome


def _failed(bench: Bench, part: str, row: Row, error: Exception) -> None:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"{row.title} FAILED: {why}", file=sys.stderr, flush=True)
    bench.record(part, {"title": row.title, "error": why})


def _print_table(bench: Bench, done: list[Outcome]) -> None:
    bench.print_table(
        "Rows, whole optimizer steps",
        HEADER,
        [
            (
                o.row.title, o.tokens_per_s, o.row.aim, o.row.floor, o.ceiling, o.share, o.torch_share,
                o.row.aim_share, o.row.floor_share, o.tflops, None if o.mfu is None else 100 * o.mfu,
                o.trained.memory_bytes / GIB, len(o.trained.seconds), o.verdict,
            )
            for o in done
        ],
        "ratio: of the ceiling, the best library time of each GEMM and attention call of the step",
        "of torch's: of a ceiling with torch's own libraries, cuBLAS and cuDNN, without FlashAttention 4",
        "ceiling: each call is timed before and after the row, and the mean counts",
        "MFU: of the published peak of the format; FLOPs of causal attention, whatever the model",
    )  # fmt: skip


def _record(outcome: Outcome) -> dict[str, Any]:
    work, done = work_of(outcome.config), outcome.trained
    return {
        "title": outcome.row.title, "row": asdict(outcome.row), "proxy": outcome.config.proxy,
        "work": asdict(work), "tokens_per_s": outcome.tokens_per_s, "step_s": done.step_s, "seconds": done.seconds,
        "first_step_s": done.first_s, "losses": done.losses, "tflops": outcome.tflops, "mfu": outcome.mfu,
        "memory_bytes": done.memory_bytes, "ceiling": outcome.ceiling, "ratio": outcome.share,
        "torch_ceiling": outcome.torch_ceiling, "torch_ratio": outcome.torch_share,
        "verdict": outcome.verdict,
    }  # fmt: skip
