"""Configurations that the native serving engine supports, checked before anything is built."""

from llmb.config.native.number_formats import check_fp8_recipe, published_fp8_recipe
from llmb.config.native.speculation import check_speculation
from llmb.config.parallel_layout import check_ranks, check_serving
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.params import FP8_BLOCK

FP8_ATTENTION_HEADS = (64, 128)  # head dimensions
COUNTS = ("isl", "osl", "num_requests", "max_batch_size", "max_num_tokens", "block_tokens")
MLA_BLOCK_MULTIPLE = 16  # tokens: MLA kernels read the KV cache in tiles of at least so many


def supported_serving(config: RunConfig) -> Inference:
    """Return the workload; raise a ConfigError if the engine does not support its settings."""
    work = config.workload
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.serve is the native engine")
    if not isinstance(work, Inference):
        raise ConfigError(f"a workload of kind {work.kind}: python -m llmb.serve runs kind inference")
    if config.precision.dtype == "mxfp4" and config.model.experts is None:
        raise ConfigError(f"dtype=mxfp4 quantizes experts, and {config.model.name} has none; choose bf16 or fp8")
    check_fp8_recipe(config.precision.fp8_recipe, work.kind, config.precision.dtype)
    _check_block_scales(config)
    _check_attention_dtype(config)
    check_speculation(config)
    for name in COUNTS:
        if getattr(work, name) < 1:
            raise ConfigError(f"workload.{name}={getattr(work, name)}: must be at least 1")
    for name in ("isl_spread", "osl_spread"):
        if getattr(work, name) < 0:
            raise ConfigError(f"workload.{name}={getattr(work, name):g}: must be at least 0")
    if not 0 < work.kv_fraction <= 1:
        raise ConfigError(f"workload.kv_fraction={work.kv_fraction:g}: must be above 0 and at most 1")
    if work.rate is not None and config.machine.gpus > 1:
        raise ConfigError(
            f"rate: arrivals by the clock need one rank, not {config.machine.gpus}, whose clocks would decide "
            "differently; choose --scale 1, or load a server: --engine openai --base-url URL"
        )
    if config.profile.profile and config.profile.profile_stop <= config.profile.profile_start:
        raise ConfigError(
            f"profile_start={config.profile.profile_start}, profile_stop={config.profile.profile_stop}: no step is "
            "profiled; profile_stop is the first step after the window"
        )
    if config.model.mla is not None and config.machine.gpu != "cpu" and work.block_tokens % MLA_BLOCK_MULTIPLE:
        raise ConfigError(f"block_tokens={work.block_tokens}: MLA on a GPU needs a multiple of {MLA_BLOCK_MULTIPLE}")
    return work


def _check_attention_dtype(config: RunConfig) -> None:
    """Refuse fp8 attention of models that have no layer for it, or beside a KV cache that is not in fp8."""
    model = config.model
    if config.precision.attention_dtype is None:
        return
    if config.precision.kv_dtype != "fp8":
        raise ConfigError(
            f"attention_dtype=fp8 rounds keys and values as an fp8 KV cache holds them, and kv_dtype is "
            f"{config.precision.kv_dtype}; set kv_dtype=fp8 too"
        )
    hindrances = {
        "latent attention (MLA)": model.mla is not None,
        "a logit softcap": model.attn_logit_softcap is not None,
        "attention sinks": model.attention_sinks,
        f"heads of {model.head_dim}": model.head_dim not in FP8_ATTENTION_HEADS,
    }
    for name, applies in hindrances.items():
        if applies:
            raise ConfigError(f"attention_dtype=fp8: {model.name} has {name}, which cuDNN's fp8 attention has not here")


def _check_block_scales(config: RunConfig) -> None:
    """Refuse block scales that a user chose for a model with other widths: its layers would stay in bf16."""
    model = config.model
    if config.precision.fp8_recipe != "blockwise" or published_fp8_recipe(model) == "blockwise":
        return
    if model.hidden % FP8_BLOCK:
        raise ConfigError(
            f"fp8_recipe=blockwise scales blocks of {FP8_BLOCK} x {FP8_BLOCK} weights, and the width of {model.name} "
            f"is {model.hidden}; choose channelwise or tensorwise"
        )


def check_serving_layout(config: RunConfig) -> None:
    """Raise a ConfigError if these ranks cannot serve the model, naming what does not divide."""
    work, parallel = config.workload, config.parallel
    assert isinstance(work, Inference)
    for name, default in (("cp", 1), ("etp", 1), ("vp", None), ("fsdp", False)):
        if getattr(parallel, name) != default:
            raise ConfigError(f"{name}={getattr(parallel, name)}: the serving engine splits by tp, pp and ep only")
    check_serving(check_ranks(parallel, parallel.world_size), config.model, work.attention_dp)
