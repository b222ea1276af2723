"""What an open engine turned out to be: the bytes of its weights and of its cache, its graphs, how weights are held."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from llmb.config.spec import Inference, RunConfig
from llmb.events import ServingFacts
from llmb.serve.engine import Engine
from llmb.serve.model_runner import TorchRunner


def engine_facts(engine: Engine, config: RunConfig, rank: int) -> ServingFacts:
    """Of this rank's share, before the first request."""
    runner, work = engine.runner, config.workload
    assert isinstance(runner, TorchRunner)
    assert isinstance(work, Inference)
    blocks, mixers = engine.load.blocks, list(runner.stack.mixers())
    per_block = work.block_tokens * sum(mixer.bytes_per_token for mixer in mixers)
    cache = blocks * per_block + (work.max_batch_size + 1) * sum(mixer.bytes_per_slot for mixer in mixers)
    held = list(held_by(runner.stack))
    dequantised = any(getattr(one, "dequantised", False) for one in held)
    return ServingFacts(
        rank=rank,
        kv_blocks=blocks,
        block_tokens=work.block_tokens,
        cache_bytes=cache,
        weight_bytes=tensor_bytes(held) - cache,
        weights_note=f"{config.precision.dtype} weights dequantised to bf16" if dequantised else None,
        dequantised=dequantised,
        graph_batches=runner.graphs.sizes,
    )


def held_by(thing: object) -> Iterator[object]:
    """The thing and all that it holds, as far as it is made of our own objects."""
    left, seen = [thing], set()
    while left:
        one: Any = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, (list, tuple)):
            left.extend(one)
        elif type(one).__module__.startswith("llmb.") and hasattr(one, "__dict__"):
            left.extend(vars(one).values())


def tensor_bytes(held: list[object]) -> int:
    """Memory of the tensors among these; what several of them share counts once."""
    storages = [one.untyped_storage() for one in held if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
