"""The rows of `outofcore_gpu.py` and `lora_gpu.py` as data, their plans, and how fast each could be at best.

Without torch: plans take seconds each, and are made side by side in processes that only plan.
"""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

from llmb.config.model import Model
from llmb.config.native.lora_shapes import TARGETS
from llmb.config.offload_plan import ATTENTION, FULL, INPUT, Lora, Plan, PlanConstraints
from llmb.config.recipe import load_all, shipped
from llmb.config.serialization import convert
from llmb.errors import ConfigError
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.plan_candidate import PlanResult
from llmb.perfmodel.offload.plan_search import best_plan
from llmb.perfmodel.offload.step_tasks import round_chunks
from llmb.perfmodel.offload.task_durations import TaskCost, TaskDurations

MIB = 1 / 1024  # GiB


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. Speeds are tokens/s of whole optimizer steps."""

    seqlen: int
    host_gib: float
    device_gib: float
    gbs: int  # sequences a step
    size: str = "8b"
    published: dict[str, float] = field(default_factory=dict, hash=False)  # on an H100, by host/device GiB there
    aim: float | None = None
    floor: float | None = None
    warm_up: bool = True  # a step that does not count; the first row of a process has one more
    chunk_tokens: int | None = None  # none: the plan chooses
    stands_for: str | None = None  # the title of the row that this is a tiny one of
    lora: Lora | None = None  # none: all weights are trained

    @property
    def title(self) -> str:
        if self.stands_for is not None:
            return f"tiny {self.stands_for}"
        budgets = f"{self.seqlen}/{self.host_gib:g}/{self.device_gib:g}"
        title = budgets if self.size == "8b" else f"{self.size} {budgets}"
        return title if self.lora is None else f"{title} lora{self.lora.rank} {self.lora.frozen_weights}"


# The longest row comes last and has no step to warm up, which would take as long as all rows of 8,192 tokens: kernels
# are chosen by then, and its plan has all optimizer state on the device, so its first step does what the others do.
ROWS = (
    Row(seqlen=8192, host_gib=75, device_gib=78, gbs=16, published={"75/78": 11_406}, aim=11_800, floor=11_400),
    Row(seqlen=8192, host_gib=60, device_gib=24, gbs=16, published={"60/24": 9_478}, aim=10_000, floor=9_600),
    Row(seqlen=8192, host_gib=60, device_gib=16, gbs=16, aim=9_500, floor=8_500),
    Row(seqlen=8192, host_gib=110, device_gib=8.8, gbs=16, published={"-/8.8": 9_645}, aim=9_800, floor=9_500),
    Row(seqlen=8192, host_gib=110, device_gib=12, gbs=16, published={"-/12": 9_706}, aim=10_000, floor=9_600),
    Row(seqlen=8192, host_gib=110, device_gib=25, gbs=16, published={"-/25": 9_983}, aim=10_400, floor=9_900),
    Row(seqlen=8192, host_gib=110, device_gib=50, gbs=16, published={"-/50": 10_802}, aim=11_200, floor=10_700),
    Row(seqlen=65536, host_gib=110, device_gib=78, gbs=1, published={"178/78": 5_400}, aim=5_450, floor=5_250),
    Row(seqlen=65536, host_gib=80, device_gib=30, gbs=1, published={"80/30": 4_517}, aim=4_700, floor=4_450),
    Row(seqlen=65536, host_gib=110, device_gib=130, gbs=1, size="15b",
        published={"160/30": 2_308, "256/77": 2_719}, aim=2_680, floor=2_450),
    Row(seqlen=262144, host_gib=110, device_gib=130, gbs=1,
        published={"160/40": 1_746, "256/78": 2_073}, aim=1_880, floor=1_750, warm_up=False),
)  # fmt: skip
LORA = Lora(rank=16, alpha=32.0, targets=TARGETS, frozen_weights="fp8")
LORA_ROWS = (
    Row(seqlen=8192, host_gib=110, device_gib=125, gbs=2, size="70b", lora=LORA),
    Row(seqlen=8192, host_gib=110, device_gib=24, gbs=2, size="70b", lora=LORA),
)
BATCH_ROW = ROWS[1]
LARGE_BATCH = 68  # sequences: what the published run of that row chose for its link
# Of the tiny rows: tokens of a sequence and of a chunk, MiB of host and device memory. They stream all the same.
TINY = {
    "8192/75/78": (64, 64, 4, 2.0),
    "8192/60/24": (64, 64, 6, 1.6),
    "8192/60/16": (64, 64, 6, 1.4),
    "8192/110/8.8": (64, 64, 8, 1.2),
    "8192/110/12": (64, 64, 8, 1.3),
    "8192/110/25": (64, 64, 8, 1.6),
    "8192/110/50": (64, 64, 8, 2.0),
    "65536/110/78": (256, 64, 3, 2.2),
    "65536/80/30": (256, 64, 6, 1.6),
    "15b 65536/110/130": (256, 64, 8, 3.0),
    "262144/110/130": (512, 128, 3, 2.2),
}
TINY_LORA = {"70b 8192/110/125 lora16 fp8": (64, 64, 8, 3.0), "70b 8192/110/24 lora16 fp8": (64, 64, 8, 2.4)}


def models() -> dict[str, Model]:
    """By size."""
    shipped_models = load_all([shipped()])["outofcore_llama3"].models
    return {size: convert(Model, shipped_models[size], size) for size in ("8b", "15b", "70b")}


def tiny_models() -> dict[str, Model]:
    """Return models of the same structure, very small; the larger one still has twice the layers."""
    shape = {"hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
    return {size: replace(model, layers=model.layers // 8, **shape) for size, model in models().items()}


def tiny_row(row: Row) -> Row:
    """The row for the tiny models, with nothing to be compared with."""
    seqlen, chunk_tokens, host, device = (TINY | TINY_LORA)[row.title]
    return replace(
        row, seqlen=seqlen, chunk_tokens=chunk_tokens, host_gib=host * MIB, device_gib=device * MIB,
        gbs=max(1, row.gbs // 4), published={}, aim=None, floor=None, stands_for=row.title,
    )  # fmt: skip


def planned(model: Model, row: Row, rates: Rates) -> PlanResult:
    """The row's plan."""
    overrides = PlanConstraints(
        dtype="bf16", seqlen=row.seqlen, host_gib=row.host_gib, device_gib=row.device_gib, gbs=row.gbs,
        chunk_tokens=row.chunk_tokens, lora=row.lora,
    )  # fmt: skip
    return best_plan(model, overrides, rates)


def plans_of(rows: Iterable[Row], sized: dict[str, Model], rates: Rates) -> dict[Row, PlanResult | str]:
    """Plan all rows concurrently; a row that does not fit gets a message."""
    workers = min(8, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        making = {row: pool.submit(planned, sized[row.size], row, rates) for row in rows}
    return {row: _result_or_error(plan) for row, plan in making.items()}


def _result_or_error(plan: Future[PlanResult]) -> PlanResult | str:
    try:
        return plan.result()
    except ConfigError as error:
        return str(error)


def ceiling_s(model: Model, plan: Plan, rates: Rates) -> float:
    """Seconds of a step's matrix products and attention alone: nothing computed again, nothing waited for."""
    durations = TaskDurations(model, plan, rates)

    def bare(cost: TaskCost) -> float:
        return durations.seconds_of(replace(cost, memory_bytes=0.0))

    chunks = [chunk for round_ in range(plan.rounds) for chunk in round_chunks(plan, round_)]
    return sum(
        model.layers * (bare(durations.forward(chunk)) + bare(durations.backward(chunk))) + bare(durations.head(chunk))
        for chunk in chunks
    )


def plan_line(model: Model, result: PlanResult) -> str:
    """Describe a plan in one line."""
    plan, expected, units = result.plan, result.simulation, ParamBuckets(model).count
    levels = ", ".join(f"{plan.levels.count(level)} {level}" for level in (FULL, ATTENTION, INPUT))
    return (
        f"{plan.gbs} sequences a step, chunks of {plan.chunk_tokens} tokens, {plan.chunks_per_round} a round, "
        f"{plan.rounds} rounds; of {units} units stay weights {plan.resident_params}, gradients {plan.resident_grads}, "
        f"state {plan.resident_states}; kept {levels}; {expected.inbound_bytes / 1e9:.4g} GB in, "
        f"{expected.outbound_bytes / 1e9:.4g} out"
    )
