"""Check in a rank that the serving engine runs a configuration: as at the desk, and what only a rank can tell."""

from collections.abc import Iterator, Sequence

import torch

from llmb.config.native.serving_support import supported_serving
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.loadgen.prompt_sampler import Prompt
from llmb.ops.device_capabilities import SERVING_FEATURES, fallback_lines
from llmb.runtime.profile_window import check_gpu_metrics
from llmb.serve.engine_builder import serving_dtypes
from llmb.serve.layers.served_moe import expert_shard_format

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def supported_workload(config: RunConfig) -> Inference:
    """Return the workload; raise a ConfigError if the engine does not support its settings."""
    work = supported_serving(config)
    check_gpu_metrics(config.profile)
    return work


def device_fallbacks(config: RunConfig, device: torch.device) -> tuple[str, ...]:
    """Return what runs in place of what a device, or a layout, lacks."""
    blockwise = config.precision.fp8_recipe == "blockwise"
    lines = fallback_lines(device, (*SERVING_FEATURES, *(["fp8_block_gemm"] if blockwise else [])))
    return (*lines, *_unquantized_experts(config))


def _unquantized_experts(config: RunConfig) -> Iterator[str]:
    """Yield a line if experts are not in the dtype of the run, because of the layout."""
    dtypes, parallel, experts = serving_dtypes(config), config.parallel, config.model.experts
    if experts is None or dtypes.format == "plain":
        return
    expert_tp = parallel.tp // parallel.ep
    if expert_shard_format(dtypes.format, config.model, expert_tp) == "plain":
        yield (
            f"no {config.precision.dtype} experts (tp={parallel.tp}, ep={parallel.ep}: shards of "
            f"{experts.ffn // expert_tp} channels are not whole groups of scales): {DTYPE_NAMES[dtypes.dtype]}"
        )


def check_steps(work: Inference, prompts: Sequence[Prompt]) -> None:
    """Raise a ConfigError if a prompt does not fit into a step without chunked prefill."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    if not work.chunked_prefill and longest > work.max_num_tokens:
        raise ConfigError(
            f"a prompt of {longest} tokens does not fit into a step of max_num_tokens={work.max_num_tokens}; "
            f"raise it to {longest} or set chunked_prefill=true"
        )
