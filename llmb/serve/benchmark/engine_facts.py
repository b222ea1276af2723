"""Facts about a built engine: bytes of weights and KV cache, captured CUDA graphs, dequantized weights."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from llmb.config.spec import Inference, RunConfig
from llmb.events import ServingFacts
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import block_bytes
from llmb.serve.model_runner import TorchModelRunner
from llmb.serve.speculative.speculative_runner import SpeculativeRunner


def engine_facts(engine: Engine, config: RunConfig, rank: int) -> ServingFacts:
    """Return the facts of this rank's engine, before the first request."""
    runner, work, draft = engine.runner, config.workload, None
    if isinstance(runner, SpeculativeRunner):
        draft, runner = runner.draft.model, runner.target
    assert isinstance(runner, TorchModelRunner)
    assert isinstance(work, Inference)
    blocks, mixers = engine.stats.blocks, list(runner.model.mixers())
    windows = engine.scheduler.windows
    window_blocks = blocks if windows is None else windows.pool.num_blocks
    full_bytes, window_bytes = block_bytes(runner.model, work, draft)
    state_bytes = (work.max_batch_size + 1) * sum(mixer.bytes_per_slot for mixer in mixers)
    cache_bytes = blocks * full_bytes + window_blocks * window_bytes + state_bytes
    objects = list(reachable_objects([runner.model, draft]))
    dequantised = any(getattr(item, "dequantised", False) for item in objects)
    return ServingFacts(
        rank=rank,
        kv_blocks=blocks,
        window_kv_blocks=None if windows is None else window_blocks,
        block_tokens=work.block_tokens,
        cache_bytes=cache_bytes,
        weight_bytes=tensor_bytes(objects) - cache_bytes,
        weights_note=f"{config.precision.dtype} weights dequantised to bf16" if dequantised else None,
        dequantised=dequantised,
        graph_batches=runner.graphs.decode_sizes,
        graph_tokens=runner.graphs.mixed_sizes,
    )


def reachable_objects(root: object) -> Iterator[object]:
    """Yield the root and everything it refers to, through containers and objects of this package."""
    pending, seen = [root], set()
    while pending:
        item: Any = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif type(item).__module__.startswith("llmb.") and hasattr(item, "__dict__"):
            pending.extend(vars(item).values())


def tensor_bytes(objects: list[object]) -> int:
    """Return the memory of the tensors among these; shared storage counts once."""
    storages = [item.untyped_storage() for item in objects if isinstance(item, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
