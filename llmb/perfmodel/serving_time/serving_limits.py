"""Whether a measured serving result is possible on its GPUs: no faster than HBM is read, or GEMMs are computed.

impossible(setup, ttft_ms=72, tpot_ms=11.25)      -> why not, or None
"""

from llmb.perfmodel.params import active_parameters
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_work import ServingWork, serving_work
from llmb.perfmodel.step_time.cluster_fabric import device

# Of the dense peak: the most that long GEMMs sustain. 689 of 989 (bf16) and 1,323 of 1,979 TFLOP/s (fp8) on an H200.
SUSTAINED = 0.70


def impossible(setup: ServingSetup, ttft_ms: float, tpot_ms: float) -> str | None:
    """Return why a result is above the limit of the GPUs; None if it is possible."""
    work, on = serving_work(setup), device(setup.gpu)
    e2e_s = (ttft_ms + (setup.osl - 1) * tpot_ms) / 1e3
    floor_ms = decode_bytes_at_least(setup, work, e2e_s, tpot_ms) / on.memory_bandwidth / setup.emitted * 1e3
    if tpot_ms < floor_ms:
        return f"TPOT {tpot_ms:.3g} ms is below the {floor_ms:.3g} ms in which HBM can be read"
    peak = on.gpu.peak_flops.get(setup.dtype) or on.gpu.peak_flops["bf16"]
    rate = 2.0 * gemm_parameters(setup) * tokens_per_s(setup, e2e_s) / setup.gpus
    if rate > SUSTAINED * peak:
        return (
            f"{rate / 1e12:,.0f} TFLOP/s/GPU in GEMMs, above the {SUSTAINED * peak / 1e12:,.0f} that the GPU sustains: "
            "prompts were probably served from a prefix cache"
        )
    return None


def tokens_per_s(setup: ServingSetup, e2e_s: float) -> float:
    """Return the prompt and output tokens per second of all clients."""
    return setup.concurrency * (setup.isl + setup.osl) * setup.length_ratio / e2e_s


def gemm_parameters(setup: ServingSetup) -> float:
    """Return the parameters that every token is multiplied with; the embedding and the LM head are not for all."""
    model = setup.shape.model
    return active_parameters(model) - model.vocab * model.hidden * (1 if model.tied_embeddings else 2)


def decode_bytes_at_least(setup: ServingSetup, work: ServingWork, e2e_s: float, tpot_ms: float) -> float:
    """Return the bytes that a rank reads in a decode step at the least: one token's experts, the running KV caches."""
    weights = work.low_bytes + work.high_bytes + work.head_bytes + work.expert_bytes * work.routed
    decoding = min(1.0, (setup.osl - 1) * tpot_ms / 1e3 / e2e_s)
    cached = setup.concurrency / setup.attention_dp * decoding * setup.isl * setup.length_ratio * work.kv_bytes
    return weights + cached / setup.pp
