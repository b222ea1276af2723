"""Parts 2, 3, 5 and 6: Llama 3.1 8b. Each row's engine is opened once, for all that the row asks for."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from infer_bench import Bench
from infer_ceilings import Rates, Term, ceiling, decode_step, steady_step, terms
from infer_kernels import Profiled, as_if_steady, profiled
from infer_peer import peer_load
from infer_profile import say_profile, small_floors
from infer_serving import Decoded, Measured, Row, config_of, decode, like, measure, opened

from llmb.config.spec import RunConfig
from llmb.serve.engine import Engine

LATENCY_AIM = {"bf16": 0.85, "fp8": 0.75}  # of the bandwidth limit, one request
PROFILED_STEPS = 10


@dataclass(frozen=True)
class Served:
    """A row, what was measured, and what its average step needs."""

    row: Row
    found: Measured
    opening_s: float  # weights, the measured cache, graphs
    needed: list[Term]
    rates: Rates

    @property
    def step_s(self) -> float:
        """Of an average step that reaches the ceiling."""
        return ceiling(self.needed, self.rates)

    @property
    def limit(self) -> float:
        """Output tokens/s of the ceiling, at the number of requests that were computed at once."""
        return self.found.most_at_once / self.step_s

    @property
    def plain(self) -> dict[str, Any]:
        needed = [asdict(term) | {"seconds": term.seconds(self.rates)} for term in self.needed]
        rest = {"opening_s": self.opening_s, "ceiling": self.limit, "terms": needed, "rates": asdict(self.rates)}
        return asdict(self.row) | asdict(self.found) | rest


@dataclass
class Found:
    """What the rows gave, part by part."""

    throughput: list[Served] = field(default_factory=list)
    latency: list[tuple[Row, Decoded]] = field(default_factory=list)
    profile: list[tuple[Row, Profiled]] = field(default_factory=list)
    beside_peer: list[float] = field(default_factory=list)  # output tokens/s on the peer's requests


def llama(bench: Bench, peer: dict[str, Any] | None) -> None:
    """Measure every row, then print the tables; what the peer gave, where it was asked for, beside ours."""
    found = Found()
    for row in bench.rows:
        wanted = [part for part in row.parts if part in bench.parts]
        if wanted:
            _measure(bench, row, wanted, found)
    if found.throughput:
        _say_throughput(bench, found.throughput)
    if found.latency:
        _say_latency(bench, found.latency)
    for row, steps in found.profile:
        title = f"5. Where a step goes: {row.title}, as in the middle of a long run"
        floors = small_floors(bench.llama, row.precision, steps.step, bench.read)
        say_profile(bench, title, steps, terms(bench.llama, row.precision, steps.step), bench.rates_of(row), floors)
    if peer is not None:
        for ours in found.beside_peer:
            _say_peer(bench, ours, peer)


def _measure(bench: Bench, row: Row, wanted: list[str], found: Found) -> None:
    config, device = config_of(bench.llama, row, bench.device), bench.device
    began = time.perf_counter()
    engine = opened(config, device, longest=row.isl + row.osl)
    opening_s = time.perf_counter() - began
    if "throughput" in wanted:
        found.throughput.append(_throughput(bench, row, engine, config, opening_s))
    if "latency" in wanted:
        settle, steps = (2, 4) if bench.tiny else (50, 200)
        context = row.isl // 2 + settle + steps
        found.latency.append((row, decode(engine, bench.llama, 1, context, settle, steps, device)))
    if "profile" in wanted:
        as_if_steady(engine, bench.llama, row)
        found.profile.append((row, profiled(engine, 4 if bench.tiny else PROFILED_STEPS, device)))
    if "peer" in wanted:
        found.beside_peer.append(measure(engine, like(config, *peer_load(bench.tiny)), device).whole)


def _throughput(bench: Bench, row: Row, engine: Engine, config: RunConfig, opening_s: float) -> Served:
    found = measure(engine, config, bench.device)
    needed = terms(bench.llama, row.precision, steady_step(row.isl, row.osl, found.most_at_once))
    served = Served(row, found, opening_s, needed, bench.rates_of(row))
    speed = f"{found.whole:,.0f} output tokens/s in {found.seconds:.1f} s"
    print(f"{row.title}: {speed}, ceiling {served.limit:,.0f}", flush=True)
    bench.keep("throughput", served.plain)
    return served


def _say_throughput(bench: Bench, done: list[Served]) -> None:
    rows = []
    for one in done:
        row, found, limit = one.row, one.found, one.limit
        ratios = (found.whole / limit, found.steady and found.steady / limit)
        rates = (found.whole, found.steady, row.published, row.aim, row.floor, limit, *ratios)
        seen = (row.title, row.requests, found.most_at_once, found.seconds)
        rows.append((*seen, *rates, found.energy.mean_power_w, one.opening_s))
    bench.say(
        "2. Offline throughput, Llama 3.1 8b, output tokens/s",
        ("row", "requests", "at once", "s", "whole run", "steady", "TRT-LLM", "aim", "floor", "ceiling",
         "whole / ceiling", "steady / ceiling", "W", "opening s"),
        rows,
        "whole run: ramp-up and drain included; steady: while the engine was full, none where there was one wave",
        "TRT-LLM: version 1.0, published for the same GPU; at once: answers that went on at the same time, at most",
    )  # fmt: skip
    bench.say(
        "   The ceiling of each row: ms of an average step, which gives every request one token",
        ("row", *(term.name for term in done[0].needed), "sum", "tokens/s"),
        [
            (one.row.title, *(1e3 * term.seconds(one.rates) for term in one.needed), 1e3 * one.step_s, one.limit)
            for one in done
        ],
        "each: bytes over read bandwidth or FLOPs over measured rate, whichever is longer; no activations",
    )


def _say_latency(bench: Bench, done: list[tuple[Row, Decoded]]) -> None:
    rows = []
    for row, found in done:
        moved = sum(term.bytes for term in terms(bench.llama, row.precision, decode_step(1, found.context)))
        floor = moved / bench.read
        speed = (1e3 * found.seconds, 1 / found.seconds, found.context, moved / 1e9, moved / found.seconds / 1e12)
        rows.append((row.dtype, *speed, 1e3 * floor, floor / found.seconds, LATENCY_AIM[row.dtype]))
        bench.keep("latency", {"dtype": row.dtype, "bytes": moved, "floor_s": floor} | asdict(found))
    bench.say(
        "3. One request at a time, Llama 3.1 8b",
        ("dtype", "ms a token", "tokens/s", "context", "GB", "TB/s", "floor ms", "of floor", "aim"),
        rows,
        "GB: block weights, the head in bf16, the cached tokens; floor: these over read bandwidth",
    )


def _say_peer(bench: Bench, ours: float, found: dict[str, Any]) -> None:
    isl, osl, requests = peer_load(bench.tiny)
    theirs = found["tokens"] / found["seconds"] if "error" not in found else None
    said = found.get("error") or f"{found['version']}, {found['attention']}"
    bench.say(
        f"6. Peer: transformers' continuous batching, Llama 3.1 8b bf16, {isl}/{osl}, {requests} requests",
        ("engine", "output tokens/s", ""),
        [("llmb", ours, ""), ("transformers", theirs, said), ("ratio", theirs and ours / theirs, "")],
        "whole run; imports, weights, warm-up and graph capture not counted, for both",
    )
    bench.keep("peer", {"ours": ours, "theirs": theirs} | found)
