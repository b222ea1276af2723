"""The engine as the benchmark drives it: a configuration, one measured phase, steps that are timed by themselves.

Throughput goes through `llmb.serve.benchmark.serving_benchmark.ServingBenchmark` and the events it records, and from
there through `llmb.perfmodel.metrics`, as in `llmb-run submit`: there is no second way to a figure.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from measure.device import release_memory
from measure.device_timer import DeviceTimer
from torch import Tensor

from llmb.config.model import Model
from llmb.config.spec import Inference, Machine, Parallel, Precision, RunConfig
from llmb.events import RequestDone, read
from llmb.perfmodel.metrics import steady_state, throughput
from llmb.runtime.gpu_sampler import GpuSampler
from llmb.runtime.rank_info import RankInfo
from llmb.runtime.recorder import EventRecorder
from llmb.serve.benchmark.energy import Energy, EnergyMeter
from llmb.serve.benchmark.prompts import PromptSampler, measured_prompts, model_info
from llmb.serve.benchmark.request_load import DataParallelShard, make_load, warmup_load
from llmb.serve.benchmark.serving_benchmark import ServingBenchmark
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import build_engine
from llmb.serve.layers.served_moe import ServedMoe
from llmb.serve.model_runner import TorchModelRunner
from llmb.serve.request import Request
from llmb.serve.scheduler import Scheduler

# Enough for every kernel to be compiled; graphs are captured when the engine opens.
WARMUP_REQUESTS, WARMUP_STEPS = 16, 4  # at most so many, and of long prompts as many as so many steps read
KV_FRACTION = 0.95


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the throughput table, and which other parts are measured with the same open engine."""

    dtype: str
    isl: int
    osl: int
    batch: int  # requests computed at once, at most
    budget: int  # tokens of a step, at most
    requests: int
    published: float | None = None  # output tokens/s of TensorRT-LLM 1.0 on one H200
    aim: float | None = None
    floor: float | None = None
    parts: tuple[str, ...] = ("throughput",)
    attention_dtype: Literal["fp8"] | None = None  # of prefills

    @property
    def title(self) -> str:
        suffix = "" if self.attention_dtype is None else f" {self.attention_dtype} attention"
        return f"{self.dtype} {self.isl}/{self.osl}{suffix}"

    @property
    def precision(self) -> Precision:
        kv_dtype = "fp8" if self.dtype in ("fp8", "mxfp4") else "bf16"
        return Precision(dtype=self.dtype, kv_dtype=kv_dtype, attention_dtype=self.attention_dtype)  # type: ignore[arg-type]


def config_of(model: Model, row: Row, device: torch.device) -> RunConfig:
    """Return a configuration with all requests at once, streamed, EOS ignored, random weights."""
    return RunConfig(
        name=row.title,
        target="bench",
        size="bench",
        machine=Machine(gpu="h200" if device.type == "cuda" else "cpu", gpus=1, gpus_per_node=1),
        model=model,
        parallel=Parallel(),
        precision=row.precision,
        workload=Inference(
            mode="max_throughput",
            use_case="bench",
            isl=row.isl,
            osl=row.osl,
            max_batch_size=row.batch,
            concurrency=row.requests,
            max_num_tokens=row.budget,
            kv_fraction=KV_FRACTION if device.type == "cuda" else 0.05,
            num_requests=row.requests,
            warmup_requests=min(WARMUP_REQUESTS, row.requests, max(2, WARMUP_STEPS * row.budget // row.isl)),
        ),
    )


def open_engine(config: RunConfig, device: torch.device, longest: int) -> Engine:
    """The engine of a configuration; what earlier ones held is let go of first."""
    release_memory(device)
    return build_engine(config, RankInfo(0, 1, device), max_seq_len=longest)


@dataclass(frozen=True)
class Measured:
    """A phase, from its recorded requests."""

    seconds: float
    whole: float  # output tokens/s, ramp-up and drain included
    steady: float | None  # output tokens/s while the engine was full; none: all requests were one wave
    in_flight: float  # on average, waiting ones included
    most_at_once: int  # answers going on at the same time
    energy: Energy


def measure(engine: Engine, config: RunConfig, device: torch.device) -> Measured:
    """Warm up, send everything, and derive the rates from what was recorded."""
    work = config.workload
    assert isinstance(work, Inference)
    info = model_info(config.model, None)
    draw = PromptSampler(work.seed, info)
    load = make_load(measured_prompts(work, info, draw), work.concurrency)
    warmup = warmup_load(work, load, 1, engine.stats.blocks * work.block_tokens, draw)
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # progress is no part of the tables
        record = EventRecorder(Path(folder), 0)
        shard = DataParallelShard(0, 1, records=True)
        bench = ServingBenchmark(work, frozenset(), engine, RankInfo(0, 1, device), shard, record)
        bench.warm_up(warmup)
        with GpuSampler(record, device) as sampler:
            energy = bench.measure(load, None, EnergyMeter(sampler))
        done = [event for event in read(record.path) if isinstance(event, RequestDone) and not event.warmup]
    return _derived(done, work, energy)


def _derived(done: list[RequestDone], work: Inference, energy: Energy) -> Measured:
    wrong = sum(request.output_tokens != request.requested_tokens for request in done)
    if wrong or len(done) != work.num_requests:
        raise RuntimeError(f"{len(done)} of {work.num_requests} requests ended, {wrong} of them with a wrong length")
    whole, window = throughput(done), steady_state(done)
    if whole is None:
        raise RuntimeError("the recorded requests have no times")
    return Measured(
        seconds=whole.duration_s,
        whole=whole.output_tokens_per_s,
        steady=window and window.output_tokens_per_s,
        in_flight=whole.mean_concurrency,
        most_at_once=_most_at_once(done),
        energy=energy,
    )


def _most_at_once(done: list[RequestDone]) -> int:
    """Return the highest number of running requests."""
    changes = sorted([(request.first_token or 0.0, 1) for request in done] + [(request.end, -1) for request in done])
    return int(max(np.cumsum([change for _, change in changes])))


def like(config: RunConfig, isl: int, osl: int, requests: int) -> RunConfig:
    """Other requests for an engine that is open."""
    work = config.workload
    assert isinstance(work, Inference)
    changed = replace(work, isl=isl, osl=osl, num_requests=requests, concurrency=requests)
    return replace(config, workload=changed)


def submit(engine: Engine, model: Model, lengths: Sequence[tuple[int, int]], first: int = 0) -> None:
    """Random prompts with these numbers of input and output tokens."""
    random = np.random.default_rng(first)
    for number, (inputs, outputs) in enumerate(lengths, start=first):
        prompt = random.integers(model.vocab, size=inputs, dtype=np.int32).tolist()
        engine.submit(Request(request_id=number, prompt=prompt, max_tokens=outputs, ignore_eos=True))


def cancel_all(engine: Engine) -> None:
    """Leave the engine idle."""
    for number in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.cancel(number)
    engine.drain()


@dataclass(frozen=True)
class Decoded:
    """Steps in which all requests generated."""

    seconds: float  # a step
    context: float  # cached tokens a request attended to, on average
    experts: float | None  # distinct experts that were visited, on average over layers; none: the model has none


def decode(
    engine: Engine, model: Model, batch: int, context: int, settle: int, steps: int, device: torch.device
) -> Decoded:
    """Read `batch` prompts, and time `steps` steps when all of them generate, at `context` tokens on average."""
    prompt = context - settle - steps // 2
    reading = -(
        -batch * context // engine.scheduler.limits.max_num_tokens
    )  # steps, in which the first generate already
    submit(engine, model, [(prompt, reading + settle + steps + 8)] * batch)
    while engine.scheduler.waiting or any(
        len(request.token_ids) <= prompt for request in engine.scheduler.running.values()
    ):
        engine.step()
    for _ in range(settle):
        engine.step()
    watch = DeviceTimer(device)
    before = _mean_length(engine)
    watch.start()
    for _ in range(steps):
        engine.step()
    seconds = watch.stop() / steps
    if len(engine.scheduler.running) != batch:
        raise RuntimeError(f"{len(engine.scheduler.running)} of {batch} requests were computed at once")
    after = _mean_length(engine)
    visited = count_active_experts(engine) if model.experts is not None else None
    cancel_all(engine)
    return Decoded(seconds, (before + after) / 2, visited)


def _mean_length(engine: Engine) -> float:
    running = engine.scheduler.running.values()
    return sum(sequence.num_tokens for sequence in running) / len(running)


def prefill(engine: Engine, model: Model, tokens: int, repeats: int, device: torch.device) -> float:
    """Seconds of a step that reads a whole prompt; the median of some."""
    watch, seconds = DeviceTimer(device), []
    for repeat in range(repeats + 1):
        submit(engine, model, [(tokens, 1)], first=repeat)
        watch.start()
        engine.step()
        seconds.append(watch.stop())
        engine.drain()
    return sorted(seconds[1:])[repeats // 2]


class _NoGraphs:
    """In place of captured graphs, for a step whose layers are to be looked into."""

    def launch(self, plan: object) -> None:
        return None


class _Listening:
    """A router that keeps what it has chosen."""

    def __init__(self, router: object):
        self._router, self.chosen_NK = router, torch.empty(0)

    def __call__(self, x_NC: Tensor, slot_mapping_N: Tensor | None) -> tuple[Tensor, Tensor]:
        weights_NK, self.chosen_NK = self._router(x_NC, slot_mapping_N)  # type: ignore[operator]
        return weights_NK, self.chosen_NK


def count_active_experts(engine: Engine) -> float:
    """Run one more step without a graph, and count the active experts of each layer."""
    runner = engine.runner
    layers = [mixer for mixer in runner.model.mixers() if isinstance(mixer, ServedMoe)]  # type: ignore[attr-defined]
    graphs, routers = runner.graphs, [layer.router for layer in layers]  # type: ignore[attr-defined]
    ears = [_Listening(router) for router in routers]
    runner.graphs = _NoGraphs()  # type: ignore[attr-defined]
    for layer, ear in zip(layers, ears, strict=True):
        layer.router = ear  # type: ignore[assignment]
    engine.step()
    counts = [
        len(ear.chosen_NK.unique()) for ear in ears
    ]  # a step without a graph has no padding, which selects no expert
    runner.graphs = graphs  # type: ignore[attr-defined]
    for layer, router in zip(layers, routers, strict=True):
        layer.router = router
    return sum(counts) / len(counts)


def with_longer_sequences(engine: Engine, longest: int) -> Engine:
    """A second engine for longer sequences on the layers and the cache of one that is idle; it has no graphs."""
    scheduler, runner = engine.scheduler, engine.runner
    assert isinstance(runner, TorchModelRunner)
    limits, pool = replace(scheduler.limits, max_seq_len=longest), scheduler.pool
    longer = TorchModelRunner(runner.model, limits.max_batch_size, longest, pool.block_tokens, limits.max_num_tokens)
    return Engine(Scheduler(pool, limits), longer)
