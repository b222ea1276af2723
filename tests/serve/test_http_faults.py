"""Clients that misbehave in every way while the server is restarted twice: nothing leaks, nothing counts twice."""

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from dataclasses import dataclass, field

import pytest
from live_server import LiveServer, server_config, write_config
from small_models import llama_model
from test_http_lifecycle import children, is_alive, resident_bytes, wait_for

MODEL = llama_model(name="tiny", layers=1, hidden=32, ffn=48, heads=2, kv_heads=1, vocab=128)
CONCURRENCY = 48
MOST_TOKENS = 24
FINISH_REASONS = ("stop", "length", "abort", "error")
KINDS = (
    *["stream"] * 6, *["whole"] * 4, *["cancel"] * 4, "vanish", "slow", "half_body", "malformed", "no_read", "too_long",
)  # fmt: skip
MALFORMED = (
    b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"prompt": 5}', b'{"prompt": "a", "n": -1}',
    b'{"prompt": "a", "x": 1}', b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": [99999999]}',
)  # fmt: skip


@dataclass
class Campaign:
    """Requests of random kinds, and what became of them."""

    url: str
    draw: random.Random
    outcomes: Counter = field(default_factory=Counter)
    stopping: bool = False

    async def run(self, count: int) -> None:
        limit = asyncio.Semaphore(CONCURRENCY)

        async def one_request() -> None:
            async with limit:
                kind = self.draw.choice(KINDS)
                try:
                    async with asyncio.timeout(60):
                        outcome = await getattr(self, kind)()
                except (ConnectionError, asyncio.IncompleteReadError):
                    outcome = "lost"
                self.outcomes[outcome] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one_request())

    @contextlib.asynccontextmanager
    async def connection(self):
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def body(self, **fields) -> tuple[int, bytes]:
        """Return the number of tokens and the body of a request."""
        count = self.draw.randint(1, MOST_TOKENS)
        prompt = [self.draw.randrange(4) for _ in range(self.draw.randint(1, 40))]  # few tokens: prefixes repeat
        common = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": self.draw.choice([0, 1])}
        return count, json.dumps(common | fields).encode()

    @staticmethod
    def send(writer, body: bytes, length: int | None = None) -> None:
        size = len(body) if length is None else length
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (size, body))

    async def stream(self, delay_s: float = 0.0) -> str:
        count, body = self.body(stream=True, stream_options={"include_usage": True})
        async with self.connection() as (reader, writer):
            self.send(writer, body)
            status = await self.status(reader)
            if status != 200:
                return self.refused(status)
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += await reader.readuntil(b"\n")
                if delay_s:
                    await asyncio.sleep(delay_s)
        if b'"error"' in data:
            assert self.stopping
            return "ended"
        events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        assert events[-1]["usage"]["completion_tokens"] == count
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "length"
        return "complete"

    async def slow(self) -> str:
        return await self.stream(delay_s=0.005)

    async def whole(self) -> str:
        count, body = self.body()
        async with self.connection() as (reader, writer):
            self.send(writer, body)
            status = await self.status(reader)
            if status != 200:
                return self.refused(status)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))[15:])
            reply = json.loads(await reader.readexactly(length))
        assert reply["usage"]["completion_tokens"] == count
        return "complete"

    async def cancel(self) -> str:
        _, body = self.body(stream=self.draw.random() < 0.7, n=self.draw.randint(1, 3))
        async with self.connection() as (reader, writer):
            self.send(writer, body)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.draw.random() * 0.05):
                    await reader.readuntil(b"data: [DONE]")
        return "cancelled"

    async def vanish(self) -> str:
        async with self.connection() as (_, writer):
            self.send(writer, self.body()[1])
        return "cancelled"

    async def half_body(self) -> str:
        async with self.connection() as (_, writer):
            body = self.body()[1]
            self.send(writer, body[: len(body) // 2], length=len(body))
            await asyncio.sleep(0.1)
            if self.draw.random() < 0.5:
                writer.write_eof()
                await asyncio.sleep(0.05)
        return "never sent"

    async def no_read(self) -> str:
        async with self.connection() as (reader, writer):
            reader._transport.pause_reading()
            self.send(writer, self.body(stream=True)[1])
            await asyncio.sleep(0.3)
        return "unread"

    async def malformed(self) -> str:
        async with self.connection() as (reader, writer):
            self.send(writer, self.draw.choice(MALFORMED))
            status = await self.status(reader)
        return self.refused(status)

    async def too_long(self) -> str:
        async with self.connection() as (reader, writer):
            self.send(writer, json.dumps({"prompt": [1] * 200}).encode())
            status = await self.status(reader)
        return self.refused(status)

    @staticmethod
    async def status(reader) -> int:
        return int((await reader.readuntil(b"\r\n")).split()[1])

    def refused(self, status: int) -> str:
        assert status == 400 or (self.stopping and status in (500, 503)), status
        return f"refused {status}"


def check_accounts(server: LiveServer, campaign: Campaign) -> None:
    """Every accepted output ended exactly once, all blocks and slots are free, and nothing went wrong inside."""
    figures = server.wait_idle()
    ended = {reason: figures[f'vllm:request_success_total{{finished_reason="{reason}"}}'] for reason in FINISH_REASONS}
    assert sum(ended.values()) == figures["vllm:request_prompt_tokens_count"]
    assert figures["vllm:e2e_request_latency_seconds_count"] == figures["vllm:request_prompt_tokens_count"]
    assert ended["error"] == ended["stop"] == 0
    assert ended["length"] >= campaign.outcomes["complete"]
    assert "internal error" not in server.output
    assert 'llmb:http_responses_total{status="500"}' not in figures


def run_campaign(tmp_path, count: int) -> Counter:
    config = write_config(tmp_path / "run", server_config(None, model=MODEL, max_batch_size=12, kv_fraction=0.0005))
    arguments = ("--max-model-len", "96", "--stall-timeout", "5", "--drain-timeout", "10")
    draw, total = random.Random(4), Counter()
    for restart, stop in enumerate((signal.SIGTERM, signal.SIGKILL, None)):
        with LiveServer(config, *arguments) as server:
            (worker,) = children(server.process.pid)
            campaign = Campaign(server.url, draw)
            part = count // 3
            asyncio.run(campaign.run(part // 2))
            check_accounts(server, campaign)
            before = resident_bytes(server.process.pid), resident_bytes(worker)
            if stop is None:
                asyncio.run(campaign.run(part // 2))
                check_accounts(server, campaign)
                grown = resident_bytes(server.process.pid) - before[0], resident_bytes(worker) - before[1]
                assert max(grown) < 24 * 2**20, grown
                assert server.stop() == 0
            else:
                asyncio.run(stopped_campaign(server, campaign, part // 2, stop))
                assert server.process.wait(30) == (0 if stop == signal.SIGTERM else -signal.SIGKILL)
            wait_for(lambda pid=worker: not is_alive(pid))
            total += campaign.outcomes
            print(f"start {restart}: {dict(campaign.outcomes)}")
    assert sum(total.values()) == 3 * 2 * (count // 3 // 2)
    return total


async def stopped_campaign(server: LiveServer, campaign: Campaign, count: int, number: int) -> None:
    """Send requests, and stop the server in the middle of them."""
    task = asyncio.create_task(campaign.run(count))
    done = sum(campaign.outcomes.values())
    while sum(campaign.outcomes.values()) < done + count // 2 and not task.done():
        await asyncio.sleep(0.01)
    campaign.stopping = True
    server.process.send_signal(number)
    await task


@pytest.mark.slow
def test_a_thousand_requests_with_faults_and_two_restarts(tmp_path):
    outcomes = run_campaign(tmp_path, 1000)
    assert outcomes["complete"] > 300
    assert outcomes["cancelled"] > 100


@pytest.mark.nightly
def test_ten_thousand_requests_with_faults_and_two_restarts(tmp_path):
    run_campaign(tmp_path, 10_000)
