"""The peer: transformers' continuous batching on the same GPU, Llama 3.1 8b in bf16 with random weights.

    python bench/infer_peer.py --requests 256 --isl 128 --osl 128 --limit 40

In a process of its own, so that whatever becomes of it the other figures stand; `infer_gpu.py` starts it (`alone`)
before its own process holds anything of the GPU, as the peer's cache is as large as free memory lets it be. Prints one
JSON line: output tokens, seconds without warm-up; or the error.
"""

import argparse
import json
import random
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from measure.peer_process import run_peer

LIMIT_S, START_S = 40.0, 45.0  # of its generation; of its imports, weights and warm-up
TINY_START_S = 260.0  # a CPU's whole memory becomes its cache
WARMUP_REQUESTS, WARMUP_TOKENS = 16, 8


def peer_load(tiny: bool) -> tuple[int, int, int]:
    """Input tokens, output tokens, requests; the engine gets the same."""
    return (16, 8, 4) if tiny else (128, 128, 256)


def alone(tiny: bool) -> dict[str, Any]:
    """Return the result of the peer's process, or why there is none. Call it before anything else uses the GPU."""
    isl, osl, requests = peer_load(tiny)
    arguments = ["--isl", str(isl), "--osl", str(osl), "--requests", str(requests), "--limit", str(LIMIT_S)]
    start_s = TINY_START_S if tiny else START_S
    return run_peer(Path(__file__).name, arguments + ["--tiny"] * tiny, LIMIT_S + start_s)


def peer(requests: int, isl: int, osl: int, limit: float, tiny: bool) -> dict[str, Any]:
    """Run all requests at once after a few warm-up requests: with this attention it has no warm-up of its own."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig, __version__

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(tiny).to(device=device, dtype=torch.bfloat16).eval()
    generation = GenerationConfig(max_new_tokens=osl, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = {"allow_block_sharing": False, "auto_switch_to_flash": False}  # prompts differ; flash comes from the net
    supported = {field.name for field in fields(ContinuousBatchingConfig)}
    batching = ContinuousBatchingConfig(**{name: value for name, value in settings.items() if name in supported})
    draw = random.Random(1)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(isl)] for _ in range(requests)]
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=5
    ) as manager:
        _generate(manager, prompts[:WARMUP_REQUESTS], WARMUP_TOKENS, limit)
        began = time.perf_counter()
        tokens = _generate(manager, prompts, osl, limit)
        seconds = time.perf_counter() - began
        attention = model.config._attn_implementation
    return {"version": __version__, "attention": attention, "tokens": tokens, "seconds": seconds}


def _generate(manager: Any, prompts: list[list[int]], osl: int, limit: float) -> int:
    """Return the output tokens, which are known only when all requests have ended."""
    ended = tokens = 0
    began = time.perf_counter()
    manager.add_requests(inputs=prompts, max_new_tokens=osl)
    while ended < len(prompts):
        if time.perf_counter() - began > limit:
            raise TimeoutError(f"only {ended} of {len(prompts)} requests ended within {limit:g} s")
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"its generation thread ended after {ended} of {len(prompts)} requests")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            ended, tokens = ended + 1, tokens + len(result.generated_tokens)
    return tokens


def _model(tiny: bool) -> Any:
    import torch
    from training.peer_llama import SHAPE, TINY
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(TINY if tiny else SHAPE), max_position_embeddings=8192, attn_implementation="sdpa")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds, warm-up not counted")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to see that it runs")
    options = parser.parse_args()
    try:
        outcome = peer(options.requests, options.isl, options.osl, options.limit, options.tiny)
    except Exception as error:  # the error is the result
        outcome = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
