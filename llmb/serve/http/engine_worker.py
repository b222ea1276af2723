"""Engine process of the server: one rank. Started by worker_processes.py, never by hand.

    python -m llmb.serve.http.engine_worker config.json FD MAX_MODEL_LEN EXACT

It exits when the HTTP process closes the socket FD, or is gone. `EXACT` is 1 if the KV cache must hold a sequence of
MAX_MODEL_LEN tokens, 0 if the maximum may be shortened to what it holds.
"""

import gc
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from llmb.config.native.speculation import refuse_drafts
from llmb.config.serialization import build, read_json
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.graph_sizes import MAX_MIXED_TOKENS
from llmb.runtime.engine_process import exit_now
from llmb.runtime.provenance import run_started
from llmb.runtime.rank_info import RankInfo, init_distributed
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.run_ending import ending_of, print_error
from llmb.serve.benchmark.engine_facts import engine_facts
from llmb.serve.benchmark.request_load import data_parallel_shard
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import build_engine
from llmb.serve.http.command_broadcast import CommandBroadcast, CommandSource, any_rank_busy
from llmb.serve.http.engine_loop import EngineLoop
from llmb.serve.http.engine_messages import ChannelClosed, EngineChannel, EngineReady
from llmb.serve.request import Request, SamplingParams
from llmb.serve.serve_oom import report_oom
from llmb.serve.serve_support import device_fallbacks
from llmb.serve.text.text_tokenizer import eos_tokens

ENGINE_NAME = "llmb.serve.http"
REPLICA = "LLMB_REPLICA"  # environment variable with the index of this engine among the replicas
WARMUP_TOKENS = 4


def main(arguments: list[str]) -> int:
    """Serve until the HTTP process closes the channel; return the exit code."""
    path = Path(arguments[0])
    descriptor, max_model_len, exact = map(int, arguments[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal or Slurm signals all processes; the HTTP process drains
    channel = EngineChannel(socket.socket(fileno=descriptor))
    error: Exception | None = None
    try:
        config = build(RunConfig, read_json(path), where=path.name)
        serve(config, path.parent, channel, max_model_len, bool(exact))
    except ChannelClosed:
        pass
    except Exception as raised:
        error = raised
        print_error(ENGINE_NAME, raised)
    return ending_of(error, int(os.environ.get("RANK", "0"))).exit_code


def serve(config: RunConfig, folder: Path, channel: EngineChannel, max_model_len: int, exact: bool) -> None:
    """Build this rank's engine, warm it up, and step it until the channel is closed."""
    work = config.workload
    assert isinstance(work, Inference)
    refuse_drafts(config)
    rank_info = init_distributed(config, ENGINE_NAME)
    with report_oom(rank_info.device, config):
        engine = build_engine(config, rank_info, max_model_len, shorten_to_cache=not exact)
        _check_cache(engine.stats.blocks * work.block_tokens, max_model_len, exact)
        commands = _command_source(engine, channel, rank_info, work.attention_dp)
        _warm_up(engine, config.model.vocab, on_gpu=rank_info.device.type == "cuda")
        _record_start(engine, config, folder, rank_info)
        shard = data_parallel_shard(rank_info.rank, config.parallel.tp, work.attention_dp)
        eos = eos_tokens(config.model, work.weights)
        loop = EngineLoop(engine, channel, shard.index, eos, reports_steps(config, rank_info.rank))
        channel.send(
            EngineReady(
                max_model_len=engine.scheduler.limits.max_seq_len,
                kv_blocks=engine.stats.blocks,
                block_tokens=work.block_tokens,
                slots=work.max_batch_size,
                prefix_cache=engine.scheduler.pool.prefix_cache,
            )
        )
        gc.collect()
        gc.freeze()  # weights and tables live as long as the process: collections need not visit them
        loop.run(commands)


def reports_steps(config: RunConfig, rank: int) -> bool:
    """Return whether a rank reports: on the last pipeline stage, which has the logits, one of those that are alike."""
    parallel, work = config.parallel, config.workload
    assert isinstance(work, Inference)
    on_last_stage = rank >= parallel.tp * (parallel.pp - 1)
    return on_last_stage and (work.attention_dp or rank % parallel.tp == 0)


def _check_cache(cache_tokens: int, max_model_len: int, exact: bool) -> None:
    if exact and cache_tokens < max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the KV cache holds {cache_tokens} tokens; choose at most that, or raise "
            "KV_CACHE_FRACTION"
        )


def _command_source(engine: Engine, channel: EngineChannel, rank_info: RankInfo, attention_dp: bool) -> CommandSource:
    """Return where commands come from; several ranks get them by broadcast."""
    if rank_info.world_size == 1:
        return CommandSource(channel)
    group = dist.new_group(backend="gloo")
    if attention_dp and engine.lockstep is None:
        engine.lockstep = partial(any_rank_busy, group)  # an idle rank must not wait while another has work
    return CommandBroadcast(channel, rank_info.rank, group)


def _warm_up(engine: Engine, vocab: int, on_gpu: bool) -> None:
    """Serve a few requests so that kernels are compiled before the first user's request."""
    scheduler = engine.scheduler
    longest = scheduler.limits.max_seq_len - WARMUP_TOKENS
    if longest < 1:
        return
    sampled = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    # On a GPU a full step, then short chunks of an odd number of tokens, together more than a CUDA graph has.
    lengths = [scheduler.limits.max_num_tokens, 8, *[301] * (MAX_MIXED_TOKENS // 301 + 1)] if on_gpu else [8, 8, 5]
    for number, length in enumerate(lengths):
        prompt = [(7 * number + position) % vocab for position in range(min(length, longest))]
        params = sampled if number == 1 else SamplingParams()
        request_id = -1 - number  # those of users begin at 0
        engine.submit(Request(request_id=request_id, prompt=prompt, max_tokens=WARMUP_TOKENS, sampling_params=params))
    engine.drain()
    scheduler.num_preemptions = scheduler.num_prefix_queries = scheduler.num_prefix_hits = 0


def _record_start(engine: Engine, config: RunConfig, folder: Path, rank_info: RankInfo) -> None:
    """Record provenance and facts of the first engine."""
    if rank_info.rank == 0 and os.environ.get(REPLICA, "0") == "0":
        events = EventRecorder(folder, 0)
        events.add(run_started(rank_info, device_fallbacks(config, rank_info.device)))
        events.add(engine_facts(engine, config, 0))


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
