"""Speed of the load generator on its no-op server, beside the server's own ceiling and a plain aiohttp loop.

    python bench/loadgen.py [--rounds 3] [--json FILE]

Clients and server share the cores of this machine. The ceiling is a client that sends ready bytes and counts those that
come back, without reading them. The peer is what most benchmark clients are: one aiohttp task per request that reads a
stream line by line and parses every event. All in one run, in turns, median of the rounds.

aims: 5,000 requests/s and 200,000 streamed tokens/s
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from measure.bench_report import BenchReport

from llmb.config.load_settings import LoadSettings
from llmb.loadgen.calibration import NoopServerProcess, run_probe
from llmb.loadgen.client.http_client import Target
from llmb.loadgen.client.http_response import ResponseParser
from llmb.loadgen.client.openai_stream import ResponseReader
from llmb.loadgen.client.request_body import RequestRenderer
from llmb.loadgen.client.sse import SseParser
from llmb.loadgen.event_loop import run_loop
from llmb.loadgen.noop_server import whole_stream
from llmb.loadgen.request_source import RequestSource
from llmb.perfmodel.metrics import percentile

CONCURRENCY = 64
AIMS = {"requests/s": 5_000, "tokens/s": 200_000}


class RawConnection(asyncio.Protocol):
    """Sends the same bytes again whenever a response has come back, without reading it."""

    def __init__(self, payload: bytes, response_bytes: int, tickets: list[int], done: asyncio.Event):
        self._payload, self._response_bytes, self._tickets, self._done = payload, response_bytes, tickets, done
        self._missing = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing <= 0:
            self._tickets[1] -= 1
            if not self._tickets[1]:
                self._done.set()
            self._send()

    def _send(self) -> None:
        if self._tickets[0] > 0 and self._transport is not None:
            self._tickets[0] -= 1
            self._missing = self._response_bytes
            self._transport.write(self._payload)


async def raw_client(load: LoadSettings, requests: int) -> float:
    """Return the seconds of the ceiling's requests."""
    request = RequestSource(load).session(0).turns[0]
    payload = RequestRenderer(load, None).payload(request)
    size = len(whole_stream(False, load.osl, load.isl, True))
    target, loop, done, tickets = Target.from_url(load.base_url), asyncio.get_running_loop(), asyncio.Event(), [0, 0]
    connect = [
        loop.create_connection(lambda: RawConnection(payload, size, tickets, done), target.host, target.port)
        for _ in range(CONCURRENCY)
    ]
    protocols = [protocol for _, protocol in await asyncio.gather(*connect)]
    tickets[:] = [requests, requests]
    start = time.perf_counter()
    for protocol in protocols:
        protocol._send()
    await done.wait()
    return time.perf_counter() - start


async def aiohttp_client(load: LoadSettings, requests: int) -> float:
    """Return the seconds of the peer's requests."""
    import aiohttp

    source, url = RequestSource(load), f"{load.base_url}/v1/completions"
    prompts = [source.session(number).turns[0].prompt for number in range(requests)]
    limit = asyncio.Semaphore(CONCURRENCY)

    async def complete(session: aiohttp.ClientSession, prompt: object) -> int:
        body = {"model": "noop", "prompt": prompt, "max_tokens": load.osl, "stream": True}
        body["stream_options"] = {"include_usage": True}
        times = []
        async with limit, session.post(url, json=body) as response:
            async for line in response.content:
                text = line.strip().removeprefix(b"data: ")
                if text and text != b"[DONE]":
                    chunk = json.loads(text)
                    if chunk["choices"] and chunk["choices"][0]["text"]:
                        times.append(time.perf_counter())
        return len(times)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        await asyncio.gather(*(complete(session, prompt) for prompt in prompts[:CONCURRENCY]))
        start = time.perf_counter()
        counts = await asyncio.gather(*(complete(session, prompt) for prompt in prompts))
        assert set(counts) == {load.osl}
        return time.perf_counter() - start


def paced(load: LoadSettings, rate: float, processes: int) -> tuple[float, float]:
    """Return median and p99 of how late requests at a rate were sent, in ms."""
    settings = replace(load, arrivals="poisson", rate=rate, concurrency=None, num_requests=int(2 * rate))
    late = [1000 * (record.sent - record.scheduled) for record in run_probe(settings, processes).records]
    return percentile(late, 50) or 0.0, percentile(late, 99) or 0.0


def parse_us(tokens_per_read: int) -> float:
    """Return the microseconds that reading one token takes without a network, at this many tokens a read."""
    stream = whole_stream(False, 512, 16, True)
    size = tokens_per_read * (len(stream) // 512)
    reads = [stream[start : start + size] for start in range(0, len(stream), size)]
    times = []
    for _ in range(20):
        start = time.perf_counter()
        parser, events, reader = ResponseParser(), SseParser(), ResponseReader()
        for data in reads:
            block = events.feed_block(parser.feed(data))
            if block:
                reader.block(block, time.perf_counter())
        times.append(time.perf_counter() - start)
    return min(times) / 512 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = BenchReport(json=options.json)
    with NoopServerProcess() as server:
        short = LoadSettings(
            base_url=server.url, model="noop", isl=16, osl=1, concurrency=CONCURRENCY, num_requests=20_000
        )
        long = replace(short, osl=512, num_requests=1_000)
        clients: dict[str, Callable[[LoadSettings, int], float]] = {
            "ceiling: bytes only": lambda load, n: run_loop(raw_client(load, n)),
            "llmb, 1 process": lambda load, n: run_probe(replace(load, num_requests=n)).seconds,
            "llmb, 2 processes": lambda load, n: run_probe(replace(load, num_requests=n), 2).seconds,
            "aiohttp loop, 1 process": lambda load, n: run_loop(aiohttp_client(load, n)),
        }
        rows = []
        rates: dict[str, dict[str, list[float]]] = {name: {"requests/s": [], "tokens/s": []} for name in clients}
        for _ in range(options.rounds):
            for name, client in clients.items():
                requests = 4_000 if "aiohttp" in name else 20_000
                rates[name]["requests/s"].append(requests / client(short, requests))
                requests = 200 if "aiohttp" in name else 1_000
                rates[name]["tokens/s"].append(requests * long.osl / client(long, requests))
        for name, figures in rates.items():
            medians = {unit: statistics.median(values) for unit, values in figures.items()}
            report.record("clients", {"client": name, **medians, "rounds": figures})
            rows.append([name, *(f"{medians[unit]:,.0f}" for unit in AIMS)])
        aims = ", ".join(f"{aim:,} {unit}" for unit, aim in AIMS.items())
        report.print_table("no-op server on the same cores", ["client", *AIMS], rows, f"aims: {aims}")
        costs = [[tokens, f"{parse_us(tokens):.2f}"] for tokens in (1, 4, 64, 512)]
        report.record("parsing", *costs)
        report.print_table("reading a stream, without a network", ["tokens per read", "us per token"], costs)
        lateness = []
        for rate, processes in ((100.0, 1), (1000.0, 1), (3000.0, 1), (3000.0, 2)):
            p50, p99 = paced(short, rate, processes)
            report.record("lateness", {"rate": rate, "processes": processes, "p50_ms": p50, "p99_ms": p99})
            lateness.append([f"{rate:,.0f}", processes, f"{p50:.3f}", f"{p99:.3f}"])
        report.print_table(
            "sent after the scheduled time", ["Poisson, requests/s", "processes", "p50 ms", "p99 ms"], lateness
        )


if __name__ == "__main__":
    main()
