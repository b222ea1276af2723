"""Checks that the native engine supports a configuration, before anything is built."""

from collections.abc import Sequence

from llmb.config.parallel_layout import check_ranks, check_serving
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.runtime.profile_window import is_under_nsight
from llmb.serve.benchmark.prompts import Prompt

COUNTS = ("isl", "osl", "num_requests", "max_batch_size", "max_num_tokens", "block_tokens")


def supported_workload(config: RunConfig) -> Inference:
    """Return the workload; raise a ConfigError if the engine does not support its settings."""
    work = config.workload
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.serve is the native engine")
    if not isinstance(work, Inference):
        raise ConfigError(f"a workload of kind {work.kind}: python -m llmb.serve runs kind inference")
    for name in COUNTS:
        if getattr(work, name) < 1:
            raise ConfigError(f"workload.{name}={getattr(work, name)}: must be at least 1")
    for name in ("isl_spread", "osl_spread"):
        if getattr(work, name) < 0:
            raise ConfigError(f"workload.{name}={getattr(work, name):g}: must be at least 0")
    if not 0 < work.kv_fraction <= 1:
        raise ConfigError(f"workload.kv_fraction={work.kv_fraction:g}: must be above 0 and at most 1")
    if config.profile.gpu_metrics and not is_under_nsight():
        raise ConfigError("the native serving engine does not run gpu_metrics=true (needs Nsight Systems)")
    return work


def check_layout(config: RunConfig) -> None:
    """Raise a ConfigError if these ranks cannot serve the model, naming what does not divide."""
    work, parallel = config.workload, config.parallel
    assert isinstance(work, Inference)
    for name, default in (("cp", 1), ("etp", 1), ("vp", None), ("fsdp", False)):
        if getattr(parallel, name) != default:
            raise ConfigError(f"{name}={getattr(parallel, name)}: the serving engine splits by tp, pp and ep only")
    check_serving(check_ranks(parallel, parallel.world_size), config.model, work.attention_dp)


def check_steps(work: Inference, prompts: Sequence[Prompt]) -> None:
    """Raise a ConfigError if a prompt does not fit into a step without chunked prefill."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    if not work.chunked_prefill and longest > work.max_num_tokens:
        raise ConfigError(
            f"a prompt of {longest} tokens does not fit into a step of max_num_tokens={work.max_num_tokens}; "
            f"raise it to {longest} or set chunked_prefill=true"
        )
