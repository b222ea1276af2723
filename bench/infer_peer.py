"""The peer: transformers' continuous batching on the same GPU, Llama 3.1 8b in bf16 with random weights.

    python bench/infer_peer.py --requests 256 --isl 128 --osl 128 --limit 30

In a process of its own, so that whatever becomes of it the other figures stand. Prints one JSON line: requests that
ended, their output tokens, seconds without warm-up; or the error.
"""

import argparse
import json
import random
import time
from dataclasses import fields
from typing import Any


def peer(requests: int, isl: int, osl: int, limit: float, tiny: bool) -> dict[str, Any]:
    """All requests at once; whatever has not ended within `limit` seconds is left out and said."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig, __version__

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(tiny).to(device=device, dtype=torch.bfloat16).eval()
    generation = GenerationConfig(max_new_tokens=osl, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = {"allow_block_sharing": False, "auto_switch_to_flash": False}  # prompts differ; flash comes from the net
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    batching = ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
    draw = random.Random(1)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(isl)] for _ in range(requests)]
    ended = tokens = 0
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=5
    ) as manager:
        began = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=osl)
        while ended < requests and time.perf_counter() - began < limit:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"its generation thread ended after {ended} of {requests} requests")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                ended, tokens = ended + 1, tokens + len(result.generated_tokens)
        seconds = time.perf_counter() - began
        attention = model.config._attn_implementation
    return {"version": __version__, "attention": attention, "ended": ended, "tokens": tokens, "seconds": seconds}


def _model(tiny: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512} if tiny else {
             "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    config = LlamaConfig(**sizes, max_position_embeddings=8192, attn_implementation="sdpa")
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
    parser.add_argument("--limit", type=float, default=30.0, help="seconds, warm-up not counted")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to see that it runs")
    options = parser.parse_args()
    try:
        found = peer(options.requests, options.isl, options.osl, options.limit, options.tiny)
    except Exception as error:  # the error is the result
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
