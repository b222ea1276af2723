"""A peer: Llama 8B trained in bf16 or fp8 on one GPU by what people use today.

    python bench/train_peer.py --kind transformers --dtype bf16 --seqlen 8192 --mbs 1 --gbs 4 --steps 2

    transformers   LlamaForCausalLM as it is, its own loss of all logits
    liger          the same with Liger-Kernel's RMSNorm, RoPE, SwiGLU and fused loss (`peer_llama.py`)
    torchtitan     its Llama 3, blocks and loss compiled, cuDNN attention; fp8 by torchao (`peer_titan.py`)

Random weights in bf16, torch's fused AdamW with state in bf16, random tokens, gradients of micro-batches added up. A
step of two micro-batches to warm up, then the steps that count, of which the median is taken. Prints one JSON line:
tokens/s, memory; what is not installed; or the error. Whatever is to be tried must be on PYTHONPATH.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from peer_process import print_result


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """Build it, step, time; with fewer sequences at once where those asked for do not fit."""
    import torch
    from device import release_memory

    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    network, vocab, facts = BUILDERS[options.kind](options, device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-6, fused=True)
    mbs = options.mbs
    while True:
        try:
            return facts | {"mbs": mbs} | _stepped(network, optimizer, vocab, mbs, options, device)
        except torch.OutOfMemoryError:
            if mbs == 1:
                raise
        mbs //= 2
        optimizer.zero_grad()
        release_memory(device)


def _stepped(
    network: Any, optimizer: Any, vocab: int, mbs: int, options: argparse.Namespace, device: Any
) -> dict[str, Any]:
    import torch
    from device import synchronize

    losses, seconds = [], []
    for sequences in (2 * mbs, *options.steps * [options.gbs]):  # the first only to warm up
        tokens_BT = torch.randint(vocab, (sequences, options.seqlen + 1), device=device)
        synchronize(device)
        began = time.perf_counter()
        loss = torch.zeros((), device=device)
        for micro_batch_BT in tokens_BT.split(mbs):
            scaled_loss = network(micro_batch_BT[:, :-1], micro_batch_BT[:, 1:]) * (len(micro_batch_BT) / sequences)
            scaled_loss.backward()
            loss += scaled_loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds[1:],
        "first_step_s": seconds[0],
        "tokens_per_s": options.gbs * options.seqlen / median(seconds[1:]),
        "losses": losses,
        "memory_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
    }


def _transformers(options: argparse.Namespace, device: Any) -> tuple[Any, int, dict[str, str]]:
    import transformers
    from peer_llama import apply_liger, filled, shaped

    fused = options.kind == "liger"
    if fused and not apply_liger(device):
        raise ImportError("liger_kernel cannot be imported, or there is no GPU")
    network = filled(shaped(options.tiny, options.seqlen, "fused" if fused else "whole"), device, device)
    how = "Liger-Kernel" if fused else "its own modules and loss"
    return network, network.llama.config.vocab_size, {"version": f"transformers {transformers.__version__}", "how": how}


def _torchtitan(options: argparse.Namespace, device: Any) -> tuple[Any, int, dict[str, str]]:
    from peer_titan import titan_llama, titan_version

    network = titan_llama(options.tiny, options.seqlen, options.dtype == "fp8", device)
    how = "blocks and loss compiled" + (", torchao float8, a scale a tensor" if options.dtype == "fp8" else "")
    return network, network.vocab, {"version": titan_version(), "how": how}


Builder = Callable[[argparse.Namespace, Any], tuple[Any, int, dict[str, str]]]
BUILDERS: dict[str, Builder] = {"transformers": _transformers, "liger": _transformers, "torchtitan": _torchtitan}
IMPORTS = {"transformers": ("peer_llama",), "liger": ("peer_llama",), "torchtitan": ("peer_titan",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=BUILDERS, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--seqlen", type=int, required=True)
    parser.add_argument("--mbs", type=int, required=True, help="sequences at once, if they fit")
    parser.add_argument("--gbs", type=int, required=True, help="sequences a step")
    parser.add_argument("--steps", type=int, default=2, help="that count")
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU, to see that it runs")
    parser.add_argument("--wait", action="store_true", help="import everything, then begin when a line is typed")
    options = parser.parse_args()
    print_result(peer, options, IMPORTS[options.kind], options.wait)


if __name__ == "__main__":
    main()
