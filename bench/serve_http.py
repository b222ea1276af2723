"""Cost of the HTTP server: the same engine and load in process and over HTTP, and what the HTTP process can write.

    python bench/serve_http.py [--json FILE] [--only=chunks] [--row fp8] [--concurrency 256]
    python bench/serve_http.py --tiny       # a very small model, with or without a GPU: shows only that it runs

chunks   a fake engine gives every stream a token 100 times a second: the chunks/s that arrive, the HTTP process's share
         of a core, and the chunks per second of its CPU time, which is what one core can do; needs no GPU
engine   closed loop of so many streams, medians of a few rounds: output tokens/s and TTFT in process and over HTTP;
         then Poisson arrivals at 0.8 of the in-process rate, the same times in both: median TTFT
Random weights, token prompts, EOS ignored; output lengths from 0.5 to 1.5 of the row's. TTFT is of the requests after
the first wave. In the closed loop of one process a request is sent between two steps, at the very moment when another
ends, as no client of a server can: it waits for no step. Poisson arrivals come at any time in both, so that the
difference is what HTTP adds. The aim: at most 3 % of throughput lost, at most 2 ms added to the TTFT.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from inference.server_process import running_server
from measure.options import build_parser, parse_options, select_rows

from llmb.config.load_settings import LoadSettings
from llmb.config.model import Model
from llmb.config.recipe import load_all, shipped
from llmb.config.serialization import build, convert, read_json, to_plain
from llmb.config.spec import Inference, Machine, Parallel, Precision, RunConfig
from llmb.loadgen.calibration import run_probe

PARTS = ("chunks", "engine")
BENCH = Path(__file__).parent
STEPS_PER_S = 100.0  # of the fake engine
MOST_LOST, MOST_ADDED_MS = 0.03, 2.0
OPEN_LOOP_LOAD = 0.8  # of the rate that the closed loop in process reaches
SEED, ARRIVAL_SEED = 2, 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """A load: requests of isl/osl tokens."""

    dtype: str
    isl: int
    osl: int
    requests: int
    budget: int = 8192
    spread: float = 0.5  # of output lengths, around osl: equal ones would all end at once

    @property
    def title(self) -> str:
        return f"{self.dtype} {self.isl}/{self.osl}"


ROWS = (
    Row(dtype="fp8", isl=128, osl=512, requests=768),
    Row(dtype="bf16", isl=1000, osl=250, requests=512),
)
TINY = Row(dtype="fp32", isl=8, osl=24, requests=24, budget=128)


@dataclass
class Outcome:
    """Times of all requests of a load, on one clock."""

    times: list[tuple[float, float, float]] = field(default_factory=list)  # sent, first token, end
    chunks: int = 0

    @property
    def seconds(self) -> float:
        return max(ended for _, _, ended in self.times) - min(sent for sent, _, _ in self.times)

    def ttft_s(self, skip: int) -> list[float]:
        """Return the times to first token, without the requests that were sent first, which came all at once."""
        return [first - sent for sent, first, _ in sorted(self.times)[skip:]]


def config_of(row: Row, concurrency: int, tiny: bool) -> RunConfig:
    recipe = load_all([shipped()])["inference_llama3.1"].models["8b"]
    model = convert(Model, recipe, "8b")
    if tiny:
        model = replace(model, layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=512)
    on_gpu = not tiny
    return RunConfig(
        name="serve_http",
        target="bench",
        size="bench",
        machine=Machine(gpu="h200" if on_gpu else "cpu", gpus=1, gpus_per_node=1),
        model=model,
        parallel=Parallel(),
        precision=Precision(dtype=row.dtype, kv_dtype="fp8" if row.dtype == "fp8" else "bf16"),  # type: ignore[arg-type]
        workload=Inference(
            mode="max_throughput",
            use_case="bench",
            isl=row.isl,
            osl=row.osl,
            max_batch_size=concurrency,
            concurrency=concurrency,
            max_num_tokens=row.budget,
            kv_fraction=0.8 if on_gpu else 0.01,
            num_requests=row.requests,
        ),
    )


def requests(row: Row, vocab: int, count: int, seed: int, osl: int) -> list[tuple[list[int], int]]:
    """Return prompts and output lengths."""
    draw, most = Random(seed), int(osl * row.spread)
    return [
        ([draw.randrange(33, vocab) for _ in range(row.isl)], draw.randint(osl - most, osl + most))
        for _ in range(count)
    ]


def longest(row: Row) -> int:
    return row.isl + row.osl + int(row.osl * row.spread)


# -- in process


def run_in_process(path: Path, out: Path, rounds: int) -> None:
    """Serve the load in this process, as the server's engine process would, and write the figures."""
    from llmb.loadgen.arrivals import Arrivals, arrival_times
    from llmb.runtime.rank_info import init_distributed
    from llmb.serve.benchmark.serving_benchmark import gc_disabled
    from llmb.serve.engine_builder import build_engine
    from llmb.serve.request import Request

    config = build(RunConfig, read_json(path), where=path.name)
    work = config.workload
    assert isinstance(work, Inference)
    row = Row(dtype="", isl=work.isl, osl=work.osl, requests=work.num_requests)
    engine = build_engine(config, init_distributed(config, "bench"), longest(row))

    def serve(count: int, osl: int, seed: int, rate: float | None = None) -> Outcome:
        outcome, waiting = Outcome(), iter(enumerate(requests(row, config.model.vocab, count, seed, osl)))
        sent: dict[int, float] = {}
        first: dict[int, float] = {}

        def send(at: float | None = None) -> None:
            for number, (tokens, length) in waiting:
                sent[number] = time.monotonic() if at is None else at
                engine.submit(
                    Request(request_id=number, prompt=tokens, max_tokens=length, on_token=on_token, on_end=on_end)
                )
                return

        def on_token(number: int, _token: int) -> None:
            outcome.chunks += 1
            if number not in first:
                first[number] = time.monotonic()

        def on_end(output: Any) -> None:
            number = output.request_id
            outcome.times.append((sent[number], first[number], time.monotonic()))
            if rate is None:
                send()

        if rate is None:
            for _ in range(work.concurrency):
                send()
            engine.drain()
            return outcome
        start = time.monotonic()
        due = deque(start + at for at in islice(arrival_times(Arrivals("poisson", rate), ARRIVAL_SEED), count))
        while due or engine.stats.running or engine.stats.waiting:
            while due and due[0] - time.monotonic() <= engine.slack_s:
                time.sleep(max(0.0, due[0] - time.monotonic()))
                send(due.popleft())
            if not engine.step() and due:
                time.sleep(max(0.0, due[0] - time.monotonic()))
        return outcome

    serve(min(work.concurrency, row.requests), min(32, row.osl), seed=1)
    with gc_disabled():
        closed = [figures(serve(row.requests, row.osl, SEED), work.concurrency) for _ in range(rounds)]
        rate = OPEN_LOOP_LOAD * row.requests / statistics.median(run["seconds"] for run in closed)
        opened = figures(serve(row.requests, row.osl, SEED, rate), work.concurrency)
    out.write_text(json.dumps({"closed": closed, "open": opened, "rate": rate}))


# -- over HTTP


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(
    url: str,
    model: str,
    load: list[tuple[list[int], int]],
    concurrency: int,
    processes: int,
    rate: float | None = None,
) -> Outcome:
    """Send requests by the load generator: over so many streams, or at a rate. Times are those they are due at."""
    arrivals: dict[str, Any] = {"concurrency": concurrency}
    if rate is not None:
        arrivals = {"arrivals": "poisson", "rate": rate, "seed": ARRIVAL_SEED}
    with NamedTemporaryFile("w", suffix=".jsonl") as dataset:
        for tokens, length in load:
            dataset.write(json.dumps({"input_ids": tokens, "output_tokens": length}) + "\n")
        dataset.flush()
        settings = LoadSettings(
            base_url=url, model=model, dataset=dataset.name, prompt_format="ids", num_requests=len(load),
            calibrate=False, **arrivals,
        )  # fmt: skip
        records = run_probe(settings, processes).records
    if failed := [record.error for record in records if record.error is not None]:
        raise SystemExit(f"{len(failed)} requests failed; the first: {failed[0]}")
    starts = [record.sent if rate is None else record.scheduled for record in records]
    times = [(at, record.first_token or record.end, record.end) for at, record in zip(starts, records, strict=True)]
    return Outcome(times, sum(len(record.token_times) for record in records))


def measure(
    process: Any, url: str, row: Row, model: Model, concurrency: int, processes: int, rate: float | None = None
) -> dict[str, Any]:
    """Send the load; add the CPU time of the HTTP process."""
    before = cpu_s(process.pid)
    load = requests(row, model.vocab, row.requests, SEED, row.osl)
    outcome = send(url, model.name, load, concurrency, processes, rate)
    seconds, cpu = outcome.seconds, cpu_s(process.pid) - before
    return figures(outcome, concurrency) | {
        "cpu_share": cpu / seconds,
        "chunks_per_cpu_s": outcome.chunks / max(cpu, 1e-9),
    }


def warm_up(url: str, row: Row, model: Model, concurrency: int, processes: int) -> None:
    load = requests(row, model.vocab, min(concurrency, row.requests), 1, min(32, row.osl))
    send(url, model.name, load, concurrency, processes)


def figures(outcome: Outcome, concurrency: int) -> dict[str, Any]:
    """Return the figures of a load; the TTFT of requests that came one by one, if there are any."""
    ttft_s = outcome.ttft_s(concurrency) or outcome.ttft_s(0)
    return {
        "chunks": outcome.chunks,
        "seconds": outcome.seconds,
        "chunks_per_s": outcome.chunks / outcome.seconds,
        "requests": len(outcome.times),
        "ttft_ms": 1e3 * statistics.median(ttft_s),
    }


def measure_chunks(folder: Path, concurrency: int, tiny: bool, processes: int) -> dict[str, Any]:
    row = Row(dtype="fp32", isl=8, osl=40 if tiny else 1000, requests=concurrency, spread=0.0)
    config = config_of(row, concurrency, tiny=True)
    path = write(folder, config)
    fake = [sys.executable, str(BENCH / "fake_engine.py"), "serve", str(STEPS_PER_S), str(path), "--port", "0"]
    with running_server(fake) as (process, url):
        warm_up(url, row, config.model, concurrency, processes)
        result = measure(process, url, row, config.model, concurrency, processes)
    print(
        f"chunks: {result['chunks_per_s']:,.0f}/s to {concurrency} streams, HTTP process at "
        f"{result['cpu_share']:.0%} of a core: {result['chunks_per_cpu_s']:,.0f} chunks per second of its CPU time",
        flush=True,
    )
    return result


def measure_engine(folder: Path, row: Row, concurrency: int, tiny: bool, processes: int, rounds: int) -> dict[str, Any]:
    config = config_of(row, concurrency, tiny)
    path, out = write(folder, config), folder / "in_process.json"
    subprocess.run([sys.executable, __file__, "--in-process", str(path), str(out), str(rounds)], check=True)
    inside = json.loads(out.read_text())
    command = [sys.executable, "-m", "llmb.serve.http", str(path), "--port", "0"]
    with running_server([*command, "--max-model-len", str(longest(row))]) as (process, url):
        load = (row, config.model, concurrency, processes)
        warm_up(url, *load)
        http: dict[str, Any] = {"closed": [measure(process, url, *load) for _ in range(rounds)]}
        http["open"] = measure(process, url, *load, inside["rate"])
    for runs in (inside, http):
        if {run["chunks"] for run in (*runs["closed"], runs["open"])} != {inside["open"]["chunks"]}:
            raise SystemExit(f"tokens are missing: {runs}")
    lost = 1 - median(http, "chunks_per_s") / median(inside, "chunks_per_s")
    added = http["open"]["ttft_ms"] - inside["open"]["ttft_ms"]
    print(f"{row.title}, {concurrency} streams, {row.requests} requests")
    for name, runs in (("in process", inside), ("over HTTP", http)):
        each = ", ".join(f"{run['chunks_per_s']:,.0f}" for run in runs["closed"])
        print(
            f"  {name:10}  {median(runs, 'chunks_per_s'):10,.0f} output tokens/s ({each})   "
            f"TTFT {median(runs, 'ttft_ms'):6.1f} ms, of Poisson arrivals {runs['open']['ttft_ms']:6.1f} ms"
        )
    print(
        f"  HTTP process at {median(http, 'cpu_share'):.0%} of a core, Poisson arrivals at {inside['rate']:.1f}/s\n"
        f"  lost {lost:.1%} (aim {MOST_LOST:.0%}), added {added:.1f} ms (aim {MOST_ADDED_MS:g} ms), in the closed loop "
        f"{median(http, 'ttft_ms') - median(inside, 'ttft_ms'):.1f} ms",
        flush=True,
    )
    return {"in_process": inside, "http": http, "lost": lost, "added_ttft_ms": added}


def median(runs: dict[str, Any], name: str) -> float:
    """Return the median of a figure over the rounds of the closed loop."""
    return statistics.median(run[name] for run in runs["closed"])


def write(folder: Path, config: RunConfig) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(to_plain(config)))
    return path


def main() -> None:
    if sys.argv[1:2] == ["--in-process"]:
        run_in_process(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = build_parser(__doc__, PARTS)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="of the closed loop")
    parser.add_argument("--client-processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 2)))
    options = parser.parse_args() if "--only=chunks" in sys.argv else parse_options(parser, PARTS, ROWS)
    options.parts = frozenset(options.only.split(","))
    concurrency = min(options.concurrency, 8) if options.tiny else options.concurrency
    rows = (TINY,) if options.tiny else select_rows(ROWS, options.row)
    results: dict[str, Any] = {"concurrency": concurrency}
    with TemporaryDirectory() as folder:
        if "chunks" in options.parts:
            results["chunks"] = measure_chunks(Path(folder), concurrency, options.tiny, options.client_processes)
        for row in rows if "engine" in options.parts else ():
            arguments = (Path(folder), row, concurrency, options.tiny, options.client_processes)
            results[row.title] = measure_engine(*arguments, rounds=1 if options.tiny else options.rounds)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
