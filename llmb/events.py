"""The event types an engine writes and every report reads: one JSON line a fact, in events.rank<N>.jsonl.

Facts only: seconds, tokens, bytes. What follows from them (tokens/s, MFU) is derived in `results/`.

    append(path, StepDone(time=..., step=1, seconds=0.5, tokens=4096, loss=11.7))
    for event in read(path): ...
"""

import errno
import json
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from llmb.config.serialization import to_json
from llmb.config.spec import Status

WHERE_SIGNAL = signal.SIGUSR2  # asks a rank for its Whereabouts


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """Who measures: hardware, versions, commit."""

    time: float  # seconds since 1970, as all times here
    rank: int = 0
    world_size: int | None = None
    gpu_name: str | None = None  # as the driver or /proc/cpuinfo prints it
    host: str | None = None
    pid: int | None = None
    commit: str | None = None  # of llmb; ends in -dirty when files differ from it
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One optimizer step. Null: not known, as in a foreign log that does not print it."""

    time: float | None = None
    rank: int = 0
    step: int  # from 1
    steps: int | None = None  # asked for in all
    seconds: float | None = None
    busy_s: float | None = None  # of these, not spent waiting for other ranks; null: cannot be told apart
    tokens: int | None = None  # by all ranks together
    loss: float | None = None
    grad_norm: float | None = None
    memory_bytes: int | None = None  # peak on the device so far
    warmup: bool | None = None  # null: the reader cannot tell, the window decides
    reported_tflops_per_gpu: float | None = None  # printed by a foreign engine, by its own formula
    reported_tokens_per_s_per_gpu: float | None = None  # printed in place of seconds, as torchtitan does


@dataclass(frozen=True, kw_only=True)
class RequestDone:
    """One inference request; times are seconds since the benchmark began, for all ranks at the same moment.

    A rank records the requests that it took itself, so each is recorded once.
    """

    rank: int = 0
    request: int
    arrival: float
    first_token: float | None = None
    token_times: tuple[float, ...] = ()  # of every token; where a stream gives several at once, of every arrival
    end: float
    input_tokens: int
    output_tokens: int
    requested_tokens: int | None = None  # how long the answer was to be
    answer_crc: int | None = None  # of its tokens, CRC-32 over int64: equal answers have equal ones, wherever computed
    finish: str | None = None  # what ended it: length, stop, cancelled
    warmup: bool = False
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServingSample:
    """How far a benchmark is, a few times a second: for the live line, and for curves of the queue and the cache.

    Counts are those of one phase: a warm-up has its own, and its own beginning.
    """

    rank: int = 0
    elapsed_s: float  # since the phase began
    warmup: bool = False
    requests: int | None = None  # asked for, of those counted here
    done: int
    waiting: int | None = None  # not begun yet
    running: int | None = None
    output_tokens: int | None = None  # so far
    blocks_used: int | None = None  # of the KV cache
    blocks: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServingFacts:
    """What the engine decided, and what the benchmark took of this rank's device. Null: not known.

    A rank may record it again when it knows more: what is not null in a later one counts.
    """

    rank: int = 0
    requests: int | None = None  # asked for in all: a dataset may hold fewer than the configuration names
    kv_blocks: int | None = None
    block_tokens: int | None = None
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    weights_note: str | None = None  # how they are held: nvfp4 weights dequantised to bf16
    dequantised: bool | None = None  # products are computed in a wider format than the one asked for
    graph_batches: tuple[int, ...] | None = None  # batch sizes that have a CUDA graph; empty: none
    peak_memory_bytes: int | None = None
    warmup_requests: int | None = None
    warmup_s: float | None = None
    energy_joules: float | None = None  # over the measured span, from the device's own counter
    power_joules: float | None = None  # the same, integrated over samples of its power
    energy_note: str | None = None  # why there is no energy
    mean_power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServingSummary:
    """The totals a foreign inference engine prints instead of its requests; keys are fields of Result."""

    time: float | None = None
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CollectiveSeen:
    """All calls of one kind in a communication trace."""

    operation: str  # AllReduce
    calls: int
    bytes: int | None  # in all; null when the datatype is unknown
    datatype: str
    ranks: int | None  # of the communicator


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """What one kind of work took of a profiled step, on average over the profiled steps of rank 0."""

    kind: str  # matrix products, attention, memory-bound work, optimizer, communication, idle
    seconds_per_step: float
    share: float  # of the step, 0 to 1


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """How far a rank had come when nothing moved any more and llmb-run asked it."""

    time: float
    rank: int
    collectives: dict[str, int]  # entered so far, by group; equal on the ranks of a group that are at the same place
    waiting: bool  # the main thread is inside torch.distributed, so for others


@dataclass(frozen=True, kw_only=True)
class LogProblem:
    """Something in a log that could not be read, kept so that nothing is dropped in silence."""

    problem: str
    count: int = 1
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """How it ended, in one word of the status list, and why."""

    time: float | None = None
    rank: int = 0
    status: Status
    reason: str | None = None
    guilty_rank: int | None = None  # whose fault it was; null: no rank's, or not known
    last_lines: tuple[str, ...] = ()  # of that rank's output


Event = (
    RunStarted
    | StepDone
    | RequestDone
    | ServingSample
    | ServingFacts
    | ServingSummary
    | CollectiveSeen
    | TimeSpent
    | Whereabouts
    | LogProblem
    | RunEnded
)
TYPES: dict[str, type] = {t.__name__: t for t in get_args(Event)}


def append(path: Path, event: Event) -> None:
    """Add one whole line with a single write, so that a killed run leaves complete lines and at most one torn end.

    What a full disk takes half of is taken back: the next line would be lost with it.
    """
    line = to_json({"event": type(event).__name__, **vars(event)}) + "\n"  # asdict would copy every number
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        data = line.encode()
        written = os.write(descriptor, data)
        if written < len(data):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def parse(line: str | bytes) -> Event | None:
    """One line as an event; None for a torn or foreign line. Fields of a newer version are passed over."""
    try:
        data: dict[str, Any] = json.loads(line)
        kind = TYPES[data.pop("event")]
        known = {f.name for f in fields(kind)}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_all(paths: Iterable[Path]) -> Iterator[Event]:
    """Every event of several files, one file after the other."""
    for path in paths:
        yield from read(path)


def read(path: Path) -> Iterator[Event]:
    """Every event of a file; lines that cannot be read become one LogProblem at the end."""
    torn = 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                event = parse(line)
                if event is not None:
                    yield event
                elif line.strip():
                    torn += 1
    except FileNotFoundError:
        return
    if torn:
        yield LogProblem(problem="unreadable event line", count=torn)
