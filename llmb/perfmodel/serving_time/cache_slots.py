"""Requests that the KV cache of a rank holds at once, and the memory they take."""

from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB, gpu, with_article
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import ServingWork, serving_work

WORKSPACE = 2 * GIB  # activations of a step, CUDA graphs, NCCL buffers
# Engines that allocate blocks as a request grows; the others reserve its whole length on admission.
ON_DEMAND = ("vllm", "sglang")
FRACTION_OF_FREE = ("trtllm", "sglang", "native")


def request_bytes(setup: ServingSetup, work: ServingWork) -> float:
    """Return the mean cache of a running request on one rank, that of a draft model included."""
    if (draft := setup.draft_alone) is not None:
        return request_bytes(setup.without_drafts, work) + request_bytes(draft, serving_work(draft))
    grown = 0.5 if setup.engine in ON_DEMAND else 1.0
    tokens = (setup.isl + grown * setup.osl) * setup.length_ratio
    windowed = min(tokens, work.held_window) * work.window_kv_bytes
    return (tokens * work.kv_bytes + windowed + work.state_bytes / 2) / setup.pp


def cache_slots(setup: ServingSetup, work: ServingWork) -> int:
    """Return the number of requests that fit, over all attention replicas; none: an error that says what would."""
    memory = gpu(setup.gpu).memory_bytes or setup.gpu_memory_bytes
    if memory is None:
        raise ConfigError(
            f"the memory of {with_article(setup.gpu)} is not known; `llmb-run probe` on a machine with one stores it"
        )
    free = _cache_bytes(setup, memory, resident_bytes(setup, work) + WORKSPACE)
    slots = int(free / request_bytes(setup, work)) * setup.attention_dp
    if slots < 1:
        need = (resident_bytes(setup, work) + request_bytes(setup, work) + WORKSPACE) / GIB
        raise ConfigError(
            f"{setup.shape.model.name} in {setup.dtype} with tp {setup.tp} pp {setup.pp} needs {need:.0f} GiB for its "
            f"weights and one request, {with_article(setup.gpu)} has {setup.memory_fraction * memory / GIB:.0f} at "
            f"memory_fraction {setup.memory_fraction:g}; use more GPUs or a smaller dtype"
        )
    return slots


def _cache_bytes(setup: ServingSetup, memory: float, taken: float) -> float:
    """Return the cache: vLLM's fraction is of all memory, the others' of what the weights leave."""
    if setup.engine in FRACTION_OF_FREE:
        return setup.memory_fraction * (memory - taken)
    return setup.memory_fraction * memory - taken


def resident_bytes(setup: ServingSetup, work: ServingWork) -> float:
    """Return the weights on one rank, the embedding and a draft model included."""
    if (draft := setup.draft_alone) is not None:
        return resident_bytes(setup.without_drafts, work) + resident_bytes(draft, serving_work(draft))
    model = setup.shape.model
    embedding = 0.0 if model.tied_embeddings else work.head_bytes
    return work.weight_bytes / setup.pp + embedding


def memory_bytes_of(setup: ServingSetup, work: ServingWork, slots: float) -> float:
    """Return the memory of one rank with `slots` running requests over all replicas."""
    return resident_bytes(setup, work) + WORKSPACE + slots / setup.attention_dp * request_bytes(setup, work)
