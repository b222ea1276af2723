"""Parts 2, 3, 5 and 6: Llama 3.1 8b. The engine of each row is opened once for all of its parts."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from infer_peer import peer_load

from inference.infer_bench import Bench
from inference.infer_ceilings import Rates, Term, ceiling, decode_step, steady_step, terms
from inference.infer_kernels import Profiled, fill_to_steady_state, profiled
from inference.infer_profile import print_profile, small_kernel_bounds
from inference.infer_serving import Decoded, Measured, Row, config_of, decode, like, measure, open_engine
from llmb.config.spec import RunConfig
from llmb.serve.engine import Engine

LATENCY_AIM = {"bf16": 0.85, "fp8": 0.75}  # of the bandwidth limit, one request
PROFILED_STEPS = 10


@dataclass(frozen=True)
class Served:
    """A row, its measurement, and the terms of its average step."""

    row: Row
    measured: Measured
    opening_s: float  # weights, cache, CUDA graphs
    needed: list[Term]
    rates: Rates

    @property
    def step_s(self) -> float:
        """Lower bound of an average step."""
        return ceiling(self.needed, self.rates)

    @property
    def limit(self) -> float:
        """Output tokens/s of the ceiling, at the measured concurrency."""
        return self.measured.most_at_once / self.step_s

    @property
    def plain(self) -> dict[str, Any]:
        needed = [asdict(term) | {"seconds": term.seconds(self.rates)} for term in self.needed]
        ceilings = {"opening_s": self.opening_s, "ceiling": self.limit, "terms": needed, "rates": asdict(self.rates)}
        return asdict(self.row) | asdict(self.measured) | ceilings


@dataclass
class LlamaResults:
    """Results of the rows by part."""

    throughput: list[Served] = field(default_factory=list)
    latency: list[tuple[Row, Decoded]] = field(default_factory=list)
    profile: list[tuple[Row, Profiled]] = field(default_factory=list)
    on_peer_requests: list[float] = field(default_factory=list)  # output tokens/s on the peer's requests


def llama(bench: Bench, peer: dict[str, Any] | None) -> None:
    """Measure every row, then print the tables, with the result of the peer if there is one."""
    results = LlamaResults()
    for row in bench.rows:
        parts = [part for part in row.parts if part in bench.parts]
        if parts:
            _measure(bench, row, parts, results)
    if results.throughput:
        _say_throughput(bench, results.throughput)
    if results.latency:
        _say_latency(bench, results.latency)
    for row, steps in results.profile:
        title = f"5. Time of a step: {row.title}, in steady state"
        floors = small_kernel_bounds(bench.llama, row.precision, steps.step, bench.read)
        print_profile(bench, title, steps, terms(bench.llama, row.precision, steps.step), bench.rates_of(row), floors)
    if peer is not None:
        for speed in results.on_peer_requests:
            _say_peer(bench, speed, peer)


def _measure(bench: Bench, row: Row, parts: list[str], results: LlamaResults) -> None:
    config, device = config_of(bench.llama, row, bench.device), bench.device
    began = time.perf_counter()
    engine = open_engine(config, device, longest=row.isl + row.osl)
    opening_s = time.perf_counter() - began
    if "throughput" in parts:
        results.throughput.append(_throughput(bench, row, engine, config, opening_s))
    if "latency" in parts:
        settle, steps = (2, 4) if bench.tiny else (50, 200)
        context = row.isl // 2 + settle + steps
        results.latency.append((row, decode(engine, bench.llama, 1, context, settle, steps, device)))
    if "profile" in parts:
        fill_to_steady_state(engine, bench.llama, row)
        results.profile.append((row, profiled(engine, 4 if bench.tiny else PROFILED_STEPS, device)))
    if "peer" in parts:
        results.on_peer_requests.append(measure(engine, like(config, *peer_load(bench.tiny)), device).whole)


def _throughput(bench: Bench, row: Row, engine: Engine, config: RunConfig, opening_s: float) -> Served:
    measured = measure(engine, config, bench.device)
    needed = terms(bench.llama, row.precision, steady_step(row.isl, row.osl, measured.most_at_once))
    served = Served(row, measured, opening_s, needed, bench.rates_of(row))
    speed = f"{measured.whole:,.0f} output tokens/s in {measured.seconds:.1f} s"
    print(f"{row.title}: {speed}, ceiling {served.limit:,.0f}", flush=True)
    bench.record("throughput", served.plain)
    return served


def _say_throughput(bench: Bench, done: list[Served]) -> None:
    rows = []
    for served in done:
        row, measured, limit = served.row, served.measured, served.limit
        ratios = (measured.whole / limit, measured.steady and measured.steady / limit)
        rates = (measured.whole, measured.steady, row.published, row.aim, row.floor, limit, *ratios)
        seen = (row.title, row.requests, measured.most_at_once, measured.seconds)
        rows.append((*seen, *rates, measured.energy.mean_power_w, served.opening_s))
    bench.print_table(
        "2. Offline throughput, Llama 3.1 8b, output tokens/s",
        ("row", "requests", "concurrency", "s", "whole run", "steady", "TRT-LLM", "aim", "floor", "ceiling",
         "whole / ceiling", "steady / ceiling", "W", "opening s"),
        rows,
        "whole run: ramp-up and drain included; steady: while the engine was full, none with a single wave",
        "TRT-LLM: version 1.0, published for the same GPU; concurrency: highest number of running requests",
    )  # fmt: skip
    bench.print_table(
        "   The ceiling of each row: ms of an average step, which gives every request one token",
        ("row", *(term.name for term in done[0].needed), "sum", "tokens/s"),
        [
            (
                served.row.title,
                *(1e3 * term.seconds(served.rates) for term in served.needed),
                1e3 * served.step_s,
                served.limit,
            )
            for served in done
        ],
        "each: bytes over read bandwidth or FLOPs over measured rate, whichever is longer; no activations",
    )


def _say_latency(bench: Bench, done: list[tuple[Row, Decoded]]) -> None:
    rows = []
    for row, decoded in done:
        moved = sum(term.bytes for term in terms(bench.llama, row.precision, decode_step(1, decoded.context)))
        floor = moved / bench.read
        speed = (
            1e3 * decoded.seconds,
            1 / decoded.seconds,
            decoded.context,
            moved / 1e9,
            moved / decoded.seconds / 1e12,
        )
        rows.append((row.dtype, *speed, 1e3 * floor, floor / decoded.seconds, LATENCY_AIM[row.dtype]))
        bench.record("latency", {"dtype": row.dtype, "bytes": moved, "floor_s": floor} | asdict(decoded))
    bench.print_table(
        "3. One request at a time, Llama 3.1 8b",
        ("dtype", "ms/token", "tokens/s", "context", "GB", "TB/s", "lower bound ms", "bound / time", "aim"),
        rows,
        "GB: block weights, the head in bf16, the cached tokens; lower bound: these over read bandwidth",
    )


def _say_peer(bench: Bench, speed: float, peer: dict[str, Any]) -> None:
    isl, osl, requests = peer_load(bench.tiny)
    peer_speed = peer["tokens"] / peer["seconds"] if "error" not in peer else None
    note = peer.get("error") or f"{peer['version']}, {peer['attention']}"
    bench.print_table(
        f"6. Peer: transformers' continuous batching, Llama 3.1 8b bf16, {isl}/{osl}, {requests} requests",
        ("engine", "output tokens/s", ""),
        [("llmb", speed, ""), ("transformers", peer_speed, note), ("ratio", peer_speed and speed / peer_speed, "")],
        "whole run; imports, weights, warm-up and graph capture not counted, for both",
    )
    bench.record("peer", {"ours": speed, "theirs": peer_speed} | peer)
