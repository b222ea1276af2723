"""Servers of several processes: replicas behind one port, and engines whose ranks share a model."""

import asyncio
import os
import signal

import pytest
from live_server import MODEL, LiveServer, server_config, write_config
from output_collector import OutputCollector
from small_models import deepseek_model
from small_served import SINGLE_RANK_INFO
from test_http_lifecycle import LONG, children, connect, read_all, running, wait_for

from llmb.serve.engine_builder import build_engine
from llmb.serve.request import Request

pytestmark = pytest.mark.slow
PROMPTS = [[(13 * number + 7 * i) % 90 for i in range(5 + 3 * number)] for number in range(10)]
MOE = deepseek_model(name="moe", layers=2, vocab=98)
LAYOUTS = {
    "replicas": (MODEL, {}, ("--replicas", "2")),
    "tp": (MODEL, {"tp": 2}, ()),
    "pp": (MODEL, {"pp": 2}, ()),
    "ep": (MOE, {"tp": 2, "ep": 2}, ()),
    "attention_dp": (MOE, {"tp": 2, "ep": 2, "attention_dp": True}, ()),
    "dense attention_dp": (MODEL, {"tp": 2, "attention_dp": True}, ()),
}


def expected_outputs(model, max_tokens: int) -> list[list[int]]:
    """Return the outputs of one engine in this process."""
    collector = OutputCollector()
    engine = build_engine(server_config(None, model=model), SINGLE_RANK_INFO, max_seq_len=128)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(collector.listen(Request(request_id=number, prompt=prompt, max_tokens=max_tokens)))
    engine.drain()
    return [list(tokens) for tokens in collector.tokens()]


def layout_config(folder, name: str):
    model, layout, arguments = LAYOUTS[name]
    ranks = layout.get("tp", 1) * layout.get("pp", 1)
    config = server_config(None, model=model, gpus=ranks, gpus_per_node=ranks, **layout)
    return write_config(folder / "run", config), arguments, ranks


NIGHTLY = ("tp", "pp", "ep", "dense attention_dp")  # the others meet the same code


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in LAYOUTS]
)
def test_every_layout_gives_the_same_outputs(tmp_path, name):
    config, arguments, ranks = layout_config(tmp_path, name)
    texts = [[f"<{token}>" if not 32 <= token < 127 else chr(token) for token in tokens]
             for tokens in expected_outputs(LAYOUTS[name][0], 20)]  # fmt: skip

    async def stream(client, prompt):
        events = await client.completions.create(
            model=LAYOUTS[name][0].name, prompt=prompt, max_tokens=20, temperature=0, stream=True, logprobs=1
        )
        logprobs = [event.choices[0].logprobs async for event in events]
        return [token for entry in logprobs for token in entry.tokens]

    async def stream_all(server):
        async with server.async_client() as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))

    with LiveServer(config, "--max-model-len", "128", *arguments) as server:
        assert len(children(server.process.pid)) == (2 if name == "replicas" else ranks)
        assert asyncio.run(stream_all(server)) == texts
        cancelled = [connect(server, LONG | {"max_tokens": 100}) for _ in range(4)]
        for sock in cancelled:
            sock.close()
        assert asyncio.run(stream_all(server)) == texts
        figures = server.wait_idle()
        engines = [key for key in figures if key.startswith("llmb:kv_blocks{")]
        assert len(engines) == (2 if name in ("replicas", "attention_dp", "dense attention_dp") else 1)
        if len(engines) == 2:
            assert all(figures[f'vllm:prefix_cache_queries_total{{engine="{engine}"}}'] > 0 for engine in "01")
        assert server.stop() == 0


def test_dead_rank_ends_the_others(tmp_path):
    config, _, _ = layout_config(tmp_path, "tp")
    with LiveServer(config, "--max-model-len", "4096") as server:
        sock = connect(server, LONG)
        wait_for(lambda: running(server) == 1)
        workers = children(server.process.pid)
        os.kill(workers[1], signal.SIGKILL)
        assert b'"code": "engine_failed"' in read_all(sock)
        assert server.process.wait(20) == 2
