"""Settings of an inference run: dependent settings, and checks for contradictions.

Messages use the names of the environment variables, as the recipes document them; `--set` takes the fields of spec.py,
which are the same in lower case.
"""

from collections.abc import Collection
from math import gcd

from llmb.config.load_settings import check_url, parse_slo
from llmb.config.model import Model
from llmb.config.native.number_formats import published_fp8_recipe
from llmb.config.native.request_lengths import check_spread
from llmb.config.recipe import Recipe, Row
from llmb.config.spec import Inference, Override, Precision, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import gpu, lacks_fp8

BLOCK = 128


def describe_lengths(recipe: Recipe, settings: Row) -> str:
    """Describe the request lengths of a proxy, beside the published ones of its use case where they differ."""
    lengths = settings["isl"], settings["osl"]
    published = {
        (row["isl"], row["osl"])
        for row in recipe.rows
        if row.get("use_case") == settings["use_case"] and type(row.get("isl")) is type(row.get("osl")) is int
    }
    replaced = [f"{isl}/{osl}" for isl, osl in sorted(published) if (isl, osl) != lengths]
    return f"lengths {lengths[0]}/{lengths[1]}" + (f" instead of {', '.join(replaced)}" if replaced else "")


def update_dependent(settings: Row, row: Row, overridden: Collection[str]) -> list[Override]:
    """Update settings that depend on changed ones, by the rules that the row itself follows.

    Concurrency is max_batch_size x schedulers, and the number of requests is a multiple of it, if so in the row.
    """
    changes: list[Override] = []
    capacity = _total_batch_size(settings)
    if "concurrency" not in overridden and row["concurrency"] == _total_batch_size(row) != capacity:
        source = "max_batch_size x the ranks with requests of their own"
        changes.append(_override(settings, "concurrency", capacity, source))
    rounds, remainder = divmod(row["num_requests"], row["concurrency"])
    scaled = rounds > 1 and not remainder and settings["concurrency"] != row["concurrency"]
    if "num_requests" not in overridden and scaled:
        requests = rounds * settings["concurrency"]
        changes.append(_override(settings, "num_requests", requests, f"{rounds} x concurrency"))
    return changes


def replace_fp8_cache(settings: Row, gpu_type: str, overridden: Collection[str]) -> list[Override]:
    """Take a bf16 KV cache where a row of another dtype has one in fp8 that the GPU cannot compute with."""
    is_default = settings.get("kv_dtype") == "fp8" and settings["dtype"] != "fp8" and "kv_dtype" not in overridden
    if not is_default or not lacks_fp8(gpu_type):
        return []
    source = f"native engine: {gpu(gpu_type).title} has no fp8"
    settings["kv_dtype"] = "bf16"
    return [Override(field="kv_dtype", value="bf16", replaced="fp8", source=source)]


def _total_batch_size(settings: Row) -> int:
    """Return the number of requests that all schedulers run at once."""
    return settings["max_batch_size"] * (settings.get("tp", 1) if settings.get("attention_dp") else 1)


def _override(settings: Row, field: str, value: int, source: str) -> Override:
    change = Override(field=field, value=value, replaced=settings[field], source=source)
    settings[field] = value
    return change


def block_scales_fit(model: Model) -> bool:
    """Return whether the K dimension of every GEMM of the model is a multiple of 128."""
    return _common_width(model, 1) % BLOCK == 0


def _common_width(model: Model, ranks: int) -> int:
    """Return the greatest common divisor of the K dimensions of all GEMMs on one of `ranks` ranks."""
    widths = [model.hidden, model.heads * (model.mla.value_dim if model.mla else model.head_dim) // ranks]
    if model.mla is not None:
        widths += [model.mla.q_rank, model.mla.kv_rank]
    if model.blocks.get("mlp"):
        widths.append(model.ffn // ranks)
    if model.experts is not None:
        widths.append(model.experts.ffn)
    if model.mamba is not None:
        widths.append(model.mamba.heads * model.mamba.head_dim // ranks)
    return gcd(*widths)


def check_settings(config: RunConfig, overridden: Collection[str]) -> None:
    """Raise on the first contradiction between settings, with a way to resolve it."""
    work = config.workload
    assert isinstance(work, Inference)
    _check_lengths(work)
    _check_token_budget(work)
    if work.mode == "min_latency":
        _check_min_latency(work)
    if work.attention_dp and config.parallel.tp == 1 and "attention_dp" in overridden:
        raise ConfigError("attention_dp has no effect on one rank; raise TP or leave it out")
    if work.prefix_cache and config.model.blocks.get("mamba"):
        raise ConfigError(
            f"prefix_cache: the Mamba state of {config.model.name} cannot be shared between requests; leave it out"
        )
    _check_precision(config)
    _check_arrivals(config, overridden)
    _check_server(config)


def _check_arrivals(config: RunConfig, overridden: Collection[str]) -> None:
    """Check the rate, and that its times can be kept."""
    work = _work(config)
    if work.slo is not None:
        parse_slo(work.slo)
    if work.rate is None:
        if work.burstiness != 1:
            raise ConfigError("burstiness has no effect without a rate; set rate=REQUESTS_PER_SECOND")
        return
    if work.mode == "min_latency":
        raise ConfigError("rate: MODE=min_latency has one request at a time; leave it out or set MODE=max_throughput")
    if "concurrency" in overridden:
        raise ConfigError(
            "concurrency has no effect with a rate: requests are sent at their time; leave one of them out"
        )


def _check_server(config: RunConfig) -> None:
    """Check that a server is named for the engine that needs one, and for no other."""
    work = _work(config)
    if config.engine == "openai":
        if work.base_url is None:
            raise ConfigError("engine openai needs a server; give --base-url URL")
        if check_url(work.base_url) != work.base_url:
            raise ConfigError(f"base_url: write it as {check_url(work.base_url)}, without a password or /v1")
        return
    for name in ("base_url", "served_model", "api_key_env"):
        if getattr(work, name) is not None:
            raise ConfigError(f"{name} has no effect with the engine {config.engine}; add --engine openai")


def _check_lengths(work: Inference) -> None:
    check_spread("isl", work.isl, work.isl_spread, work.lengths)
    check_spread("osl", work.osl, work.osl_spread, work.lengths)


def _check_token_budget(work: Inference) -> None:
    """Check that a full decode batch, and a prompt without chunked prefill, fit the token budget of a step."""
    longest = work.isl + (int(work.isl_spread) if work.lengths == "uniform" else 0)
    if longest > work.max_num_tokens and not work.chunked_prefill and work.dataset is None:
        raise ConfigError(
            f"prompts of {longest} tokens exceed MAX_NUM_TOKENS={work.max_num_tokens} without chunked prefill; "
            f"set MAX_NUM_TOKENS={longest} or ENABLE_CHUNKED_PREFILL=true"
        )
    if work.max_batch_size > work.max_num_tokens:
        raise ConfigError(
            f"MAX_BATCH_SIZE={work.max_batch_size} requests need a token each, which exceeds "
            f"MAX_NUM_TOKENS={work.max_num_tokens} per step; set MAX_BATCH_SIZE={work.max_num_tokens} or "
            f"MAX_NUM_TOKENS={work.max_batch_size}"
        )


def _check_min_latency(work: Inference) -> None:
    """Check that a latency run has one request at a time and streams its output."""
    remedy = "leave it out or set MODE=max_throughput"
    for variable, value in (("MAX_BATCH_SIZE", work.max_batch_size), ("CONCURRENCY", work.concurrency)):
        if value != 1:
            raise ConfigError(f"{variable}={value}: MODE=min_latency has one request at a time; {remedy}")
    if not work.streaming:
        raise ConfigError(f"STREAMING=false: MODE=min_latency measures each token; {remedy}")
    if work.attention_dp:
        raise ConfigError("attention_dp: MODE=min_latency has one request, which cannot be split over ranks")


def _check_precision(config: RunConfig) -> None:
    precision, model = config.precision, config.model
    for name in ("dtype", "kv_dtype"):
        if getattr(precision, name) == "fp8" and lacks_fp8(config.machine.gpu):
            raise ConfigError(f"{name} fp8: {gpu(config.machine.gpu).title} has no fp8 GEMMs; choose bf16")
    ranks = 1 if _work(config).attention_dp else config.parallel.tp
    if precision.fp8_recipe == "blockwise" and _common_width(model, ranks) % BLOCK:
        common = _common_width(model, ranks)
        raise ConfigError(
            f"fp8_recipe=blockwise needs widths that are multiples of {BLOCK}, those of {model.name} on {ranks} "
            f"rank(s) are multiples of {common}; choose fp8_recipe=channelwise or tensorwise"
        )


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


def proxy_fp8_recipe(model: Model, precision: Precision) -> tuple[Precision, str | None]:
    """Return per-channel scaling, and a note, for a proxy too narrow for its model's published block scaling."""
    too_narrow = published_fp8_recipe(model) == "blockwise" and not block_scales_fit(model)
    if precision.dtype != "fp8" or precision.fp8_recipe is not None or not too_narrow:
        return precision, None
    return Precision(
        dtype="fp8", kv_dtype=precision.kv_dtype, fp8_recipe="channelwise"
    ), "per-channel scales, not per-block"
