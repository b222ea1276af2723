"""A peer: transformers' Llama 8B in training on one GPU that has only so much memory.

    python bench/outofcore_peer.py --seqlen 65536 --gbs 1 --at-once 1 --device-gib 78 --checkpointing

The model is that of `peer_llama.py`, with Liger-Kernel where `liger_kernel` can be imported; else with its own modules,
and the loss in chunks of 2,048 tokens. torch's fused AdamW with state in bf16. `--checkpointing` is transformers'
gradient checkpointing of every layer; `--offload` torch.autograd.graph.save_on_cpu in pinned memory; `--fsdp` FSDP2
(fully_shard of every layer and of the whole, CPUOffloadPolicy) on one rank: AdamW runs on the CPU then. Torch may hold
the budget less what the driver takes. One pass and an update to warm up, one step that counts. Prints one JSON line:
tokens/s, memory; or the error.
"""

import argparse
import time
from contextlib import nullcontext
from typing import Any

from peer_process import print_result

from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.plan_memory import CONTEXT_BYTES


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """Build it, take a small and a whole step, time the second."""
    import torch
    from device import synchronize
    from transformers import __version__

    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (options.device_gib * GIB - CONTEXT_BYTES) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    network, kernels = _network(options, device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-6, fused=True)
    vocab = network.llama.config.vocab_size
    losses, seconds = [], 0.0
    for sequences in (options.at_once, options.gbs):
        tokens = torch.randint(vocab, (sequences, options.seqlen + 1), device=device)
        synchronize(device)
        began = time.perf_counter()
        losses.append(_step(network, optimizer, tokens, options))
        synchronize(device)
        seconds = time.perf_counter() - began
    return {
        "version": f"transformers {__version__}",
        "kernels": kernels,
        "gbs": options.gbs,
        "at_once": options.at_once,
        "seconds": seconds,
        "tokens_per_s": options.gbs * options.seqlen / seconds,
        "losses": losses,
        "memory_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
    }


def _step(network: Any, optimizer: Any, tokens: Any, options: argparse.Namespace) -> float:
    """A whole optimizer step; gradients of its parts are added up."""
    import torch

    parts = tokens.split(options.at_once)
    pinned = tokens.is_cuda
    total = 0.0
    for part in parts:
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned) if options.offload else nullcontext():
            loss = network(part[:, :-1], part[:, 1:]) * (len(part) / len(tokens))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(total)


def _network(options: argparse.Namespace, device: Any) -> tuple[Any, str]:
    """The model with its loss, and which kernels it has; its weights are drawn where it computes."""
    import torch
    from peer_llama import apply_liger, filled, shaped

    fused = apply_liger(device)
    network = shaped(options.tiny, options.seqlen, "fused" if fused else "chunked")
    if options.checkpointing:
        network.llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.fsdp:
        _shard(network, device)
    home = torch.device("cpu") if options.fsdp else device
    kernels = "Liger-Kernel" if fused else "no Liger-Kernel here: its own modules, chunked loss"
    return filled(network, home, device), kernels


def _shard(network: Any, device: Any) -> None:
    """FSDP2 on one rank: nothing is shared, but state lives on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    how = {"mesh": init_device_mesh(device.type, (1,))}
    if device.type == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    for layer in network.llama.model.layers:
        fully_shard(layer, **how)
    fully_shard(network, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, required=True)
    parser.add_argument("--gbs", type=int, required=True, help="sequences a step")
    parser.add_argument("--at-once", type=int, required=True, help="of these, in one pass")
    parser.add_argument("--device-gib", type=float, required=True)
    for flag in ("--fsdp", "--checkpointing", "--offload"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU, to see that it runs")
    options = parser.parse_args()
    print_result(peer, options)


if __name__ == "__main__":
    main()
