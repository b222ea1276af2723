"""An engine process that computes nothing: every running request gets a token each step, at a fixed rate.

    python bench/fake_engine.py serve STEPS_PER_S config.json --port 0      the HTTP server over it

It shows what the HTTP process can do, whatever the device.
"""

import argparse
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from llmb.config.serialization import build, read_json
from llmb.config.server_options import add_server_options, server_options
from llmb.config.spec import RunConfig
from llmb.loadgen.event_loop import run_loop
from llmb.serve.http.engine_messages import ChannelClosed, EngineChannel, EngineReady, EngineState, StepReport, Submit
from llmb.serve.http.http_server import HttpServer


def work(channel: EngineChannel, vocab: int, steps_per_s: float) -> None:
    """Generate tokens until the channel is closed."""
    channel.send(EngineReady(max_model_len=1 << 20, kv_blocks=1, block_tokens=64, slots=1 << 20, prefix_cache=False))
    running: dict[int, int] = {}
    step, next_at = 0, time.perf_counter()
    while True:
        starts = []
        for command in channel.receive(0 if running else None):
            if isinstance(command, Submit):
                running[command.request_id] = command.max_tokens
                starts.append((command.request_id, 0))
            else:
                running.pop(command.request_id, None)
        next_at = max(next_at + 1 / steps_per_s, time.perf_counter())
        time.sleep(max(0.0, next_at - time.perf_counter()))
        step += 1
        ids = list(running)
        ends = []
        for request_id in ids:
            running[request_id] -= 1
            if not running[request_id]:
                del running[request_id]
                ends.append((request_id, "length"))
        tokens = [33 + (step + request_id) % min(vocab - 33, 90) for request_id in ids]
        channel.send(StepReport(starts, ids, tokens, None, ends, [], EngineState(running=len(running))))


def main(arguments: list[str]) -> int:
    role, steps_per_s, config, *more = arguments
    loaded = build(RunConfig, read_json(Path(config)), where=config)
    if role == "serve":
        command = (sys.executable, __file__, "work", steps_per_s)
        parser = argparse.ArgumentParser()
        add_server_options(parser)
        return run_loop(HttpServer(Path(config), loaded, server_options(parser.parse_args(more)), command).run())
    with suppress(ChannelClosed):
        work(EngineChannel(socket.socket(fileno=int(more[0]))), loaded.model.vocab, float(steps_per_s))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
