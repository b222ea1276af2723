"""A peer: Llama 8B trained in bf16 or fp8 on one GPU by what people use today, with all of its memory or some of it.

    python bench/train_peer.py --kind transformers --dtype bf16 --seqlen 8192 --mbs 1 --gbs 4 --steps 2
    python bench/train_peer.py --kind best --seqlen 65536 --mbs 1 --gbs 1 --device-gib 78 --checkpointing

    transformers   LlamaForCausalLM as it is, its own loss of all logits
    liger          the same with Liger-Kernel's RMSNorm, RoPE, SwiGLU and fused loss (`training/peer_llama.py`)
    best           liger where `liger_kernel` can be imported, else transformers with its loss in chunks of tokens
    torchtitan     its Llama 3, blocks and loss compiled, cuDNN attention; fp8 by torchao (`training/peer_titan.py`)

Random weights in bf16, torch's fused AdamW with state in bf16, random tokens, gradients of micro-batches added up. With
transformers' Llama, `--checkpointing` is its gradient checkpointing of every layer; `--offload`
torch.autograd.graph.save_on_cpu in pinned memory; `--fsdp` FSDP2 (fully_shard of every layer and of the whole,
CPUOffloadPolicy) on one rank: AdamW runs on the CPU then. Torch may hold the budget less what the driver takes. A step
of at most two micro-batches to warm up, then the steps that count, of which the median is taken. Prints one JSON line:
tokens/s, memory; what is not installed; or the error. Whatever is to be tried must be on PYTHONPATH.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

from measure.peer_process import print_result

from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.plan_memory import CONTEXT_BYTES


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """Build it, step, time; with fewer sequences at once where those asked for do not fit."""
    import torch
    from measure.device import release_memory

    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    _limit_memory(options, device)
    network, vocab, facts = BUILDERS[options.kind](options, device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-6, fused=True)
    mbs = options.mbs
    while True:
        try:
            return facts | {"gbs": options.gbs, "mbs": mbs} | _stepped(network, optimizer, vocab, mbs, options, device)
        except torch.OutOfMemoryError:
            if mbs == 1:
                raise
        mbs //= 2
        optimizer.zero_grad()
        release_memory(device)
        _limit_memory(options, device)


def _limit_memory(options: argparse.Namespace, device: Any) -> None:
    """Leave torch the budget, if there is one."""
    import torch

    if options.device_gib is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (options.device_gib * GIB - CONTEXT_BYTES) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def _stepped(
    network: Any, optimizer: Any, vocab: int, mbs: int, options: argparse.Namespace, device: Any
) -> dict[str, Any]:
    import torch
    from measure.device import synchronize

    losses, seconds = [], []
    for sequences in (min(2 * mbs, options.gbs), *options.steps * [options.gbs]):  # the first only to warm up
        tokens_BT = torch.randint(vocab, (sequences, options.seqlen + 1), device=device)
        synchronize(device)
        began = time.perf_counter()
        loss = torch.zeros((), device=device)
        for micro_batch_BT in tokens_BT.split(mbs):
            with torch.autograd.graph.save_on_cpu(pin_memory=loss.is_cuda) if options.offload else nullcontext():
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
        "memory_gib": torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else None,
    }


def _transformers(options: argparse.Namespace, device: Any) -> tuple[Any, int, dict[str, str]]:
    import torch
    import transformers
    from training.peer_llama import apply_liger, filled, shaped

    fused = options.kind != "transformers" and apply_liger(device)
    if options.kind == "liger" and not fused:
        raise ImportError("liger_kernel cannot be imported, or there is no GPU")
    network = shaped(options.tiny, options.seqlen, "fused" if fused else LOSSES[options.kind])
    if options.checkpointing:
        network.llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.fsdp:
        _shard(network, device)
    filled(network, torch.device("cpu") if options.fsdp else device, device)
    how = "Liger-Kernel" if fused else f"no Liger-Kernel: its own modules, {LOSSES[options.kind]} loss"
    return network, network.llama.config.vocab_size, {"version": f"transformers {transformers.__version__}", "how": how}


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


def _torchtitan(options: argparse.Namespace, device: Any) -> tuple[Any, int, dict[str, str]]:
    from training.peer_titan import titan_llama, titan_version

    network = titan_llama(options.tiny, options.seqlen, options.dtype == "fp8", device)
    how = "blocks and loss compiled" + (", torchao float8, a scale a tensor" if options.dtype == "fp8" else "")
    return network, network.vocab, {"version": titan_version(), "how": how}


Builder = Callable[[argparse.Namespace, Any], tuple[Any, int, dict[str, str]]]
LOSSES = {"transformers": "whole", "best": "chunked"}
BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(("transformers", "liger", "best"), _transformers),
    "torchtitan": _torchtitan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=BUILDERS, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--seqlen", type=int, required=True)
    parser.add_argument("--mbs", type=int, required=True, help="sequences at once, if they fit")
    parser.add_argument("--gbs", type=int, required=True, help="sequences a step")
    parser.add_argument("--steps", type=int, default=2, help="that count")
    parser.add_argument("--device-gib", type=float, help="memory of the device that it may use; default: all")
    for flag in ("--fsdp", "--checkpointing", "--offload"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU, to see that it runs")
    parser.add_argument("--wait", action="store_true", help="import everything, then begin when a line is typed")
    options = parser.parse_args()
    print_result(
        peer, options, (f"training.peer_{'titan' if options.kind == 'torchtitan' else 'llama'}",), options.wait
    )


if __name__ == "__main__":
    main()
