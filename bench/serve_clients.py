"""Do other clients agree with ours? The same load by llmb-run load, vllm bench serve, GuideLLM and AIPerf in turn.

    make peers                                    # the clients, or LLMB_VLLM_VENV, LLMB_GUIDELLM_VENV, LLMB_AIPERF_VENV
    python bench/serve_clients.py [--json FILE] [--rounds 3] [--only=schedule] [--row c8] [--clients llmb,vllm]
    python bench/serve_clients.py --tiny          # a very small model, few requests: shows only that it runs

engine     `llmb-run serve` on a tiny random Llama; what the server itself measured in the same run (/metrics) is the
           truth, whatever else runs on the machine
schedule   the no-op server with a first token after 60 ms and one every 8 ms from then on: the truth is known
ceiling    the no-op server without delays: the tokens/s that a client can read; and the CPU time of a token, by the
           difference between two numbers of requests, which leaves out the client's start

The server has one core, the client another (taskset; --server-core and --client-core). Each client gets the same
prompts, warms up with as many requests as there are at once (not GuideLLM), and reports; rounds are interleaved and
medians printed, as ratios to ours. The aim: within 5 %; * marks what is not.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from inference.external_clients import CLIENTS, ClientFigures, ClientLoad, environment_of, run_client
from inference.server_process import running_server
from inference.tiny_llama import MEDIUM, SMALL, server_config, write_tiny_llama
from measure.options import select_rows

from llmb.config.serialization import to_plain
from llmb.loadgen.prompt_text import TextWriter, load_tokenizer

PARTS = ("engine", "schedule", "ceiling")
TTFT_MS, ITL_MS = 60.0, 8.0  # of the schedule
MEANS = {  # of a client, and what the server calls it
    "ttft_mean_ms": "vllm:time_to_first_token_seconds",
    "tpot_mean_ms": "vllm:time_per_output_token_seconds",
    "e2e_mean_ms": "vllm:e2e_request_latency_seconds",
}
FIGURES = ("requests_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms")
HEADS = ("req/s", "output tok/s", "TTFT ms", "TPOT ms", "E2E ms")
AIM = 0.05


@dataclass(frozen=True)
class Row:
    """A load."""

    isl: int
    osl: int
    concurrency: int
    requests: int

    @property
    def title(self) -> str:
        return f"{self.isl}/{self.osl} c{self.concurrency} n{self.requests}"


ROWS = (Row(128, 32, 1, 24), Row(128, 32, 8, 96), Row(256, 128, 8, 48))
CEILING = (Row(128, 128, 8, 80), Row(128, 128, 8, 400))


@contextmanager
def server(command: Sequence[str], core: str) -> Iterator[str]:
    """Start a server with one thread on a core; give its URL."""
    with running_server([*pinned(core), *command], {"OMP_NUM_THREADS": "1"}) as (_, url):
        yield url


def pinned(core: str) -> tuple[str, ...]:
    return ("taskset", "-c", core) if core else ()


def server_command(part: str, folder: Path, tiny: bool) -> list[str]:
    if part == "engine":
        path = folder.parent / "server.json"
        path.write_text(json.dumps(to_plain(server_config(folder, SMALL if tiny else MEDIUM))))
        return [sys.executable, "-m", "llmb.serve.http", str(path), "--port", "0"]
    noop = [sys.executable, "-m", "llmb.loadgen.noop_server", "--port", "0"]
    return noop + (["--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)] if part == "schedule" else [])


def prompts(folder: Path, row: Row, seed: int) -> list[str]:
    """Return prompts of exactly so many tokens, those of the warm-up first."""
    writer, draw = TextWriter(load_tokenizer(folder)), Random(seed)
    return [writer.text(draw, row.isl, serial=number) for number in range(row.concurrency + row.requests)]


def measure(part: str, rows: Sequence[Row], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all clients in turn, round after round, on one server; return their figures by load and client."""
    runs: dict[str, dict[str, list[ClientFigures]]] = {
        row.title: {name: [] for name in options.clients} for row in rows
    }
    servers: dict[str, dict[str, list[dict[str, float]]]] = {
        row.title: {name: [] for name in options.clients} for row in rows
    }
    loads = []
    with server(server_command(part, folder, options.tiny), options.server_core) as url:
        for number in range(options.rounds):
            for row in rows:
                warmup = 0 if part == "engine" else row.concurrency  # the server's own figures know no warm-up
                load = ClientLoad(
                    url=url,
                    model=folder.name if part == "engine" else "noop",
                    tokenizer=folder,
                    prompts=prompts(folder, row, number)[row.concurrency - warmup :],
                    osl=row.osl,
                    concurrency=row.concurrency,
                    warmup=warmup,
                )
                for name in options.clients:
                    before = server_sums(url) if part == "engine" else {}
                    out = folder.parent / f"{part}-{row.title.replace('/', '-')}-{name}-{number}"
                    figures = run_client(name, load, out, pinned(options.client_core))
                    least = row.requests * (0.98 if part == "ceiling" else 1)  # GuideLLM then leaves out the last ones
                    if figures.failed or not least <= figures.completed <= row.requests:
                        raise SystemExit(
                            f"{name} on {row.title}: {figures.completed} completed, {figures.failed} failed"
                        )
                    runs[row.title][name].append(figures)
                    if part == "engine":
                        servers[row.title][name].append(server_means(before, server_sums(url)))
                loads.append(os.getloadavg()[0])
                print(f"{part} {row.title}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    medians = {title: {name: median_of(figures) for name, figures in by.items()} for title, by in runs.items()}
    raw = {title: {name: [asdict(f) for f in figures] for name, figures in by.items()} for title, by in runs.items()}
    return {"medians": medians, "runs": raw, "servers": servers, "load_average": round(statistics.median(loads), 2)}


def server_sums(url: str) -> dict[str, float]:
    """Return sum and count of the server's latencies so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    sums = {}
    for metric in MEANS.values():
        for kind in ("sum", "count"):
            match = re.search(rf"^{metric}_{kind}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            sums[f"{metric}_{kind}"] = float(match[1]) if match else 0.0
    return sums


def server_means(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the server's mean latencies in ms between two moments."""
    change = {name: after[name] - before[name] for name in after}
    return {name: 1000 * change[f"{metric}_sum"] / change[f"{metric}_count"] for name, metric in MEANS.items()}


def print_server_table(title: str, runs: dict[str, Any], servers: dict[str, Any]) -> None:
    """Print each client's mean latency over the server's in the same run, and the difference; medians of rounds."""
    print(f"\n{title}: client / server, same run\n{'':12}" + "".join(f"{head:>22}" for head in HEADS[2:]))
    for name, figures in runs.items():
        cells = []
        for mean in MEANS:
            pairs = [(figure[mean], server[mean]) for figure, server in zip(figures, servers[name], strict=True)]
            ratio = statistics.median(client / server for client, server in pairs)
            added = statistics.median(client - server for client, server in pairs)
            cells.append(f"{ratio:.3f}{'' if abs(ratio - 1) <= AIM else '*'} ({added:+.2f} ms)")
        print(f"{name:12}" + "".join(f"{cell:>22}" for cell in cells))


def median_of(runs: Sequence[ClientFigures]) -> dict[str, float]:
    return {name: statistics.median(getattr(run, name) for run in runs) for name in (*FIGURES, "cpu_s")}


def truth(row: Row) -> dict[str, float]:
    """Return what the schedule makes of a load, for a client that loses no time between requests."""
    e2e_ms = TTFT_MS + (row.osl - 1) * ITL_MS
    requests_per_s = row.concurrency / e2e_ms * 1000
    return dict(zip(FIGURES, (requests_per_s, requests_per_s * row.osl, TTFT_MS, ITL_MS, e2e_ms), strict=True))


def print_table(title: str, medians: dict[str, dict[str, float]], expected: dict[str, float] | None) -> None:
    """Print a line a client: each figure, and in brackets its ratio to the first line."""
    lines = ({"schedule": expected} if expected else {}) | medians
    base = next(iter(lines.values()))
    print(f"\n{title}\n{'':12}" + "".join(f"{head:>22}" for head in HEADS))
    for name, figures in lines.items():
        cells = []
        for figure in FIGURES:
            ratio = figures[figure] / base[figure]
            note = "" if figures is base else f" ({ratio:.3f}{'' if abs(ratio - 1) <= AIM else '*'})"
            cells.append(f"{figures[figure]:,.2f}{note}")
        print(f"{name:12}" + "".join(f"{cell:>22}" for cell in cells))


def print_ceiling(few: dict[str, dict[str, float]], many: dict[str, dict[str, float]], tokens: int) -> None:
    """Print what each client can read; `tokens`: by how many the two loads differ."""
    print(f"\n{'ceiling':12}{'tokens/s read':>16}{'CPU us a token':>16}{'CPU s to start':>16}")
    for name, figures in many.items():
        cost_s = (figures["cpu_s"] - few[name]["cpu_s"]) / tokens
        start_s = few[name]["cpu_s"] - cost_s * CEILING[0].requests * CEILING[0].osl
        print(f"{name:12}{figures['output_tokens_per_s']:>16,.0f}{1e6 * cost_s:>16.1f}{start_s:>16.1f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--row", default="", help="only loads with one of these in their title")
    parser.add_argument(
        "--clients", default=",".join(CLIENTS), help=f"of {','.join(CLIENTS)}; the first is compared with"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server-core", default="0", help="for taskset; empty: any")
    parser.add_argument("--client-core", default="1", help="for taskset; empty: any")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.parts, options.clients = options.only.split(","), options.clients.split(",")
    if unknown := set(options.parts) - set(PARTS) | set(options.clients) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; parts are {PARTS}, clients are {tuple(CLIENTS)}")
    missing = [name for name in options.clients if name != "llmb" and environment_of(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; run `make peers`, or leave them out with --clients")
    options.rows = select_rows(ROWS, options.row)
    return options


def main() -> None:
    options = parse()
    rows, ceiling = options.rows, CEILING
    if options.tiny:
        options.rounds = 1
        rows = [replace(row, requests=2 * row.concurrency, osl=min(row.osl, 16)) for row in rows[:1]]
        ceiling = (replace(CEILING[0], requests=16), replace(CEILING[1], requests=32))
    report: dict[str, Any] = {"began": time.strftime("%F %T"), "rounds": options.rounds}
    with TemporaryDirectory() as temporary:
        folder = write_tiny_llama(Path(temporary) / "tiny-llama", SMALL if options.tiny else MEDIUM)
        for part in options.parts:
            report[part] = measure(part, ceiling if part == "ceiling" else rows, folder, options)
            medians = report[part]["medians"]
            if part == "ceiling":
                few, many = ceiling
                print_ceiling(medians[few.title], medians[many.title], (many.requests - few.requests) * many.osl)
            for row in rows if part != "ceiling" else ():
                print_table(f"{part} {row.title}", medians[row.title], truth(row) if part == "schedule" else None)
                if part == "engine":
                    print_server_table(row.title, report[part]["runs"][row.title], report[part]["servers"][row.title])
            print(f"load average {report[part]['load_average']}, {options.rounds} rounds", flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
