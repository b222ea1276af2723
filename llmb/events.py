"""Event types that engines write and reports read: one JSON line per event, in events.rank<N>.jsonl.

Measured facts only: seconds, tokens, bytes. Figures derived from them (tokens/s, MFU) are computed in `results/`.

    append(path, StepDone(time=..., step=1, seconds=0.5, tokens=4096, loss=11.7))
    for event in read(path): ...
"""

import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from sys import intern
from types import NoneType
from typing import Any, get_args

from llmb.config.serialization import current_names, field_types, parse_json_line, to_json
from llmb.config.spec import Status
from llmb.formats.dense_reader import read_lines
from llmb.formats.json_checks import PLAIN_CHECKS, Check, check_range, conversion

MAX_LINE_BYTES = 2**26  # a request with the times of a million tokens has a third
HANG_REPORT_SIGNAL = signal.SIGUSR2  # makes a rank write its HangReport


@dataclass(frozen=True, kw_only=True)
class RunLaunched:
    """Launch of one start of a run that restarts after a failure; written by llmb-run."""

    time: float  # seconds since 1970, as all `time` fields
    start: int  # 0, then one more for each restart
    step: int  # of the checkpoint it continues from; 0: from the beginning
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """Start of a rank: hardware, versions, commit."""

    time: float
    rank: int = 0
    world_size: int | None = None
    gpu_name: str | None = None  # as the driver or /proc/cpuinfo prints it
    host: str | None = None
    pid: int | None = None
    commit: str | None = None  # of llmb; ends in -dirty when files differ from it
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] | None = None  # power limit, clocks, throttling, ...: fields of formats.device_facts
    fallbacks: tuple[str, ...] = ()  # what the device lacks and what runs instead, a line each


@dataclass(frozen=True, kw_only=True)
class RunResumed:
    """A run that continues from a checkpoint."""

    time: float
    rank: int = 0
    step: int  # of the checkpoint
    checkpoint: str
    differences: tuple[str, ...] = ()  # from the run that wrote it, accepted by force_resume


@dataclass(kw_only=True, slots=True)
class StepDone:
    """One optimizer step. Null: unknown, as when an external log does not print it.

    Not frozen and with slots, as RequestDone: a run may have a million of them, and a frozen one takes five times as
    long to build.
    """

    time: float | None = None
    rank: int = 0
    step: int  # from 1
    steps: int | None = None  # requested in total
    seconds: float | None = None
    busy_s: float | None = None  # of these, not spent waiting for other ranks; null: unknown
    tokens: int | None = None  # of all ranks
    loss: float | None = None
    grad_norm: float | None = None
    memory_bytes: int | None = None  # peak device memory so far
    warmup: bool | None = None  # null: unknown, the measured window decides
    reported_tflops_per_gpu: float | None = None  # printed by an external engine, by its own formula
    reported_tokens_per_s_per_gpu: float | None = None  # printed instead of seconds, as torchtitan does


@dataclass(kw_only=True, slots=True)
class RequestDone:
    """One inference request; times are seconds since the start of the benchmark, which is the same for all ranks.

    Each request is recorded once, by the rank that it was assigned to.
    """

    rank: int = 0
    request: int
    arrival: float  # when it was sent
    scheduled: float | None = None  # when it was due; null: it had no time of its own
    first_byte: float | None = None  # of the response
    first_token: float | None = None
    token_times: Sequence[float] = ()  # of every token, or of every chunk where several arrive at once
    end: float
    input_tokens: int
    output_tokens: int
    requested_tokens: int | None = None  # requested output length
    output_crc: int | None = None  # CRC-32 over the output tokens as int64, to compare outputs across machines
    finish: str | None = None  # finish reason: length, stop, cancelled
    warmup: bool = False
    error: str | None = None  # its first word names the kind: connect, timeout, http, truncated, ...
    cached_tokens: int | None = None  # of the input, read from the prefix cache, as the server says
    cacheable_tokens: int | None = None  # of the input, that an unlimited prefix cache would hold
    counted_by: str | None = (
        None  # who counted output tokens: usage (server), tokenizer, chunks, nobody; null: the engine
    )
    client_tokens: int | None = None  # of the output, by the client's tokenizer
    session: int | None = None  # of a conversation of several turns
    turn: int | None = None  # from 0


@dataclass(frozen=True, kw_only=True)
class ServingSample:
    """Progress of a serving benchmark, a few times a second: for the live line, and for plots of queue and cache.

    Counts are those of one phase: warm-up and measurement are counted separately.
    """

    rank: int = 0
    elapsed_s: float  # since the start of the phase
    warmup: bool = False
    requests: int | None = None  # of this phase
    done: int
    waiting: int | None = None  # not scheduled yet
    running: int | None = None
    output_tokens: int | None = None  # so far
    blocks_used: int | None = None  # KV cache
    blocks: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServingFacts:
    """Decisions of the engine, and memory and energy that the benchmark took on this rank's device. Null: unknown.

    A rank may record it several times; non-null fields of later ones win.
    """

    rank: int = 0
    requests: int | None = None  # in total: a dataset may hold fewer than the configuration requests
    kv_blocks: int | None = None
    window_kv_blocks: int | None = None  # of layers with a sliding window; null: they have the same as all others
    block_tokens: int | None = None
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    weights_note: str | None = None  # storage format: nvfp4 weights dequantized to bf16
    dequantised: bool | None = None  # GEMMs run in a wider format than the requested dtype
    graph_batches: tuple[int, ...] | None = None  # batch sizes of decodes captured as CUDA graphs; empty: none
    graph_tokens: tuple[int, ...] | None = None  # token counts of captured steps with prefill chunks
    peak_memory_bytes: int | None = None
    warmup_requests: int | None = None
    warmup_s: float | None = None
    energy_joules: float | None = None  # over the measured interval, from the device's energy counter
    power_joules: float | None = None  # the same, integrated from power samples
    energy_note: str | None = None  # why no energy was measured
    mean_power_w: float | None = None
    verifications: int | None = None  # of draft tokens by the model, in the measured phase
    draft_trials: tuple[int, ...] | None = None  # drafts that were compared with the model's own token, by position
    draft_accepted: tuple[int, ...] | None = None  # of these, accepted
    plain_tpot_ms: float | None = None  # of one batch of requests without drafts, before the measured phase
    drafted_tpot_ms: float | None = None  # of the same requests with drafts


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """State of this rank's GPU, twice a second. It is no sign of progress. Null: the driver does not say."""

    time: float
    rank: int = 0
    measured: bool | None = None  # taken in the measured interval; null: the times of steps tell
    power_w: float | None = None
    power_limit_w: float | None = None  # enforced
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()  # why clocks are below the highest: idle, power cap, thermal slowdown, ...
    read_s: float | None = None  # CPU time that the sampling thread took for its sample before


@dataclass(frozen=True, kw_only=True)
class ServingSummary:
    """Totals that an external inference engine prints instead of single requests; keys are fields of Result."""

    time: float | None = None
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientFacts:
    """Cost and lateness of the load generator itself. Null: not measured."""

    processes: int | None = None
    request_cost_us: float | None = None  # CPU time of the client on a no-op server
    token_cost_us: float | None = None  # of each streamed token
    idle_lateness_p50_ms: float | None = None  # of sends at a low rate, on a no-op server
    idle_lateness_p99_ms: float | None = None
    lateness_ms: dict[str, float] | None = None  # percentiles over this load, of requests that no cap held back
    loop_lag_ms: dict[str, float] | None = None  # how late the event loop was, the error of a time stamp
    cpu_fraction: float | None = None  # of a core, the busiest process
    server_cache_queries: float | None = None  # input tokens looked up in the server's prefix cache, by its counters
    server_cache_hits: float | None = None


@dataclass(frozen=True, kw_only=True)
class CollectiveSeen:
    """All calls of one kind in a communication trace."""

    operation: str  # AllReduce
    calls: int
    bytes: int | None  # total; null when the datatype is unknown
    datatype: str
    ranks: int | None  # of the communicator


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Time of one kind of work, averaged over the profiled steps of rank 0."""

    kind: str  # matrix products, attention, memory-bound work, optimizer, communication, idle
    seconds_per_step: float
    share: float  # fraction of the step, 0 to 1


@dataclass(frozen=True, kw_only=True)
class FaultInjected:
    """A fault that this rank is about to inject into itself, as its configuration says."""

    time: float
    rank: int  # of the plan; each rank of a lost node records it
    fault: int  # index in the plan
    kind: str
    step: int


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """State of a rank when the run made no progress and llmb-run asked for it."""

    time: float
    rank: int
    collectives: dict[str, int]  # entered so far, by group; equal on ranks of a group that have reached the same point
    waiting: bool  # the main thread is inside torch.distributed: it waits for other ranks


@dataclass(frozen=True, kw_only=True)
class LogProblem:
    """A part of a log that could not be parsed, recorded so that nothing is dropped silently."""

    problem: str
    count: int = 1
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """Status of a finished run, and the reason for it."""

    time: float | None = None
    rank: int = 0
    status: Status
    reason: str | None = None
    failed_rank: int | None = None  # rank that caused the failure; null: none, or unknown
    last_lines: tuple[str, ...] = ()  # of that rank's output


Event = (
    RunLaunched
    | RunStarted
    | RunResumed
    | StepDone
    | RequestDone
    | ServingSample
    | ServingFacts
    | GpuSample
    | ServingSummary
    | ClientFacts
    | CollectiveSeen
    | TimeSpent
    | FaultInjected
    | HangReport
    | LogProblem
    | RunEnded
)
TYPES: dict[str, type] = {t.__name__: t for t in get_args(Event)}
RENAMED_TYPES = {"Whereabouts": "HangReport"}  # name in older files: current name


def event_line(event: Event) -> str:
    """Return the line of an event, without fields that are null as they are by default: half of those of a request."""
    kind: Any = type(event)
    values = ((name, getattr(event, name), default) for name, default in _defaults(kind).items())
    fields = {name: value for name, value, default in values if value is not None or default is not None}
    return to_json({"event": kind.__name__, **fields}) + "\n"


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclass_fields(kind)}


def append(path: Path, event: Event) -> None:
    """Append one line with a single write, so that a killed run leaves complete lines and at most one truncated one.

    A line that a full disk takes only in part is truncated away: it would corrupt the next line.
    """
    line = event_line(event)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        data = line.encode()
        written = os.write(descriptor, data)
        if written < len(data):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def parse(line: str | bytes) -> Event | None:
    """Parse one line; None for a truncated, unknown or wrongly typed line. Fields of a newer version are ignored."""
    try:
        data = parse_json_line(line)
        kind, given_fields, numbers, checks = _checks(data["event"], tuple(data), tuple(map(type, data.values())))
        fields = {name: data[key] for name, key in given_fields}
        if numbers is not None:
            check_range(numbers(data))
        for name, convert in checks:
            fields[name] = convert(fields[name])
        event: Event = kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return event


@lru_cache(maxsize=1000)
def _checks(
    event: str, keys: tuple[str, ...], types: tuple[type, ...]
) -> tuple[Any, list[tuple[str, str]], Callable[[dict[str, Any]], Sequence[float]] | None, list[tuple[str, Check]]]:
    """Return the type of the event of this name; the fields of it that a line gives, with their keys in it; what gets
    all its numbers, to check their range; and the check of each other value.

    Nearly all lines of a file have the same fields with values of the same types, and there may be a million of them:
    types of plain values are checked here, once for all, and nulls are left out where they are the default.
    """
    kind = TYPES[RENAMED_TYPES.get(event, event)]
    conversions, defaults = _conversions(kind), _defaults(kind)
    given_fields, numbers, checks = [], [], []
    type_of = dict(zip(keys, types, strict=True))
    for name, key in current_names(kind.__name__, dict(zip(keys, keys, strict=True))).items():
        if name not in conversions:
            continue
        convert, nullable = conversions[name]
        if type_of[key] in PLAIN_CHECKS.get(convert, ()):
            numbers += [key] if type_of[key] in (int, float) else []
        elif type_of[key] is not NoneType:
            checks.append((intern(name), convert))
        elif not nullable:
            raise TypeError(name)
        if type_of[key] is not NoneType or defaults[name] is not None:
            given_fields.append((intern(name), key))  # interned: keyword arguments are matched faster
    get_numbers = itemgetter(*numbers, numbers[0]) if numbers else None  # twice: of one key it would get no tuple
    return kind, given_fields, get_numbers, checks


@cache
def _conversions(kind: type) -> dict[str, tuple[Check, bool]]:
    """Return the conversion of each field, and whether it may be null."""
    return {name: conversion(annotation) for name, annotation in field_types(kind).items()}


def read_all(paths: Iterable[Path]) -> Iterator[Event]:
    """Yield the events of several files, one file after the other."""
    for path in paths:
        yield from read(path)


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a file; lines that cannot be parsed become one LogProblem at the end."""
    unreadable = 0
    for line in read_lines(path, MAX_LINE_BYTES):
        event = parse(line)
        if event is not None:
            yield event
        elif line.strip():
            unreadable += 1
    if unreadable:
        yield LogProblem(problem="unreadable event line", count=unreadable)
