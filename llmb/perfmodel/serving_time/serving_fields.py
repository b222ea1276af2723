"""Serving descriptions from text: `--set tp=2`, concurrencies such as 1,4,16..1024, a resolved inference run."""

import re
from dataclasses import replace
from typing import Any

from llmb.config.native.request_lengths import Lengths, check_spread, prompt_random, run_lengths, sample_lengths
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.hardware import memory_bytes
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.serving_time.serving_rows import DEFAULT_TOKENS, DTYPES, default_kv_dtype
from llmb.perfmodel.serving_time.serving_setup import FRACTIONS, KV_DTYPES, WAVES, ServingSetup
from llmb.perfmodel.shapes.model_catalog import ModelShape, run_shape
from llmb.perfmodel.step_time.cluster_fabric import FABRICS
from llmb.perfmodel.step_time.setup_fields import parse_fields

COUNTS = (
    "tp", "pp", "ep", "attention_dp", "moe_tp", "max_num_tokens", "max_batch_size", "receive_interval", "waves",
)  # fmt: skip
SPREADS = ("isl_spread", "osl_spread")
DISTRIBUTIONS = ("fixed", "normal", "uniform")
FIELDS = (*COUNTS, *FRACTIONS, "lengths", *SPREADS, "draft_tokens", "kv_dtype", "attention_dtype", "engine_version")
SEED = 1234  # of sampled lengths: that of runs
MOST_CLIENTS = 1 << 20


def parse_serving_settings(settings: list[str]) -> dict[str, Any]:
    """Return `FIELD=VALUE` settings by field, checked."""
    return parse_fields(settings, FIELDS, _parse_value)


def _parse_value(name: str, text: str) -> Any:
    if name in COUNTS:
        if not re.fullmatch(r"[1-9]\d{0,8}", text):
            raise ConfigError(f"{name} must be a whole number, 1 or more, got {text!r}")
        return int(text)
    if name in FRACTIONS:
        if not re.fullmatch(r"0?\.\d{1,6}|1(\.0)?", text):
            raise ConfigError(f"{name} must be above 0 and at most 1, got {text!r}")
        return float(text)
    if name == "draft_tokens":
        if not re.fullmatch(r"\d{1,2}", text):
            raise ConfigError(f"{name} must be a whole number, got {text!r}")
        return int(text)
    if name in SPREADS:
        if not re.fullmatch(r"\d{1,7}", text):
            raise ConfigError(f"{name} must be a whole number of tokens, got {text!r}")
        return int(text)
    if name == "lengths" and text not in DISTRIBUTIONS:
        raise UnknownName("value of lengths", text, DISTRIBUTIONS)
    if name == "engine_version" and not re.match(r"v?\d", text):
        raise ConfigError(f"engine_version must be a release such as 0.13.0, got {text[:60]!r}")
    if name == "kv_dtype" and text not in KV_DTYPES:
        raise UnknownName("value of kv_dtype", text, KV_DTYPES)
    return text


def build_serving_setup(
    shape: ModelShape,
    gpu: str,
    dtype: str,
    engine: str,
    lengths: tuple[int, int],
    concurrency: int,
    values: dict[str, Any],
    rates: Rates | None = None,
) -> ServingSetup:
    """Return the description of any model and layout; experts are split by moe_tp unless ep is given."""
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, [name for name in DTYPES if name])
    dtype = DTYPES[dtype]
    fields: dict[str, Any] = {
        "max_num_tokens": DEFAULT_TOKENS.get(engine, 8192),
        "kv_dtype": default_kv_dtype(engine, gpu, dtype),
    }
    if shape.model.experts:
        ranks = values.get("tp", 1) * values.get("attention_dp", 1)
        fields["moe_tp"] = max(1, ranks // values.get("ep", 1))
        if "moe_tp" in values and "ep" not in values:
            fields["ep"] = max(1, ranks // values["moe_tp"])
    layout = {name: value for name, value in values.items() if name not in ("lengths", *SPREADS)}
    setup = ServingSetup(
        shape=shape, gpu=gpu, dtype=dtype, engine=engine, isl=lengths[0], osl=lengths[1], concurrency=concurrency,
        rates=rates, gpu_memory_bytes=rates.device_memory_bytes if rates and gpu not in FABRICS else None,
        **(fields | layout),
    )  # fmt: skip
    return replace(setup, lengths=_varied_lengths(setup, values))


def _varied_lengths(setup: ServingSetup, values: dict[str, Any]) -> Lengths:
    """Return the lengths of all requests where `values` say how they vary; only a followed scheduler needs them."""
    kind, isl_spread, osl_spread = values.get("lengths", "fixed"), *(values.get(name, 0) for name in SPREADS)
    check_spread("isl", setup.isl, isl_spread, kind)
    check_spread("osl", setup.osl, osl_spread, kind)
    if kind != "fixed" and not (isl_spread or osl_spread):
        raise ConfigError(f"lengths={kind} has no effect without a spread; set isl_spread or osl_spread, in tokens")
    if kind == "fixed":
        return ()
    if setup.engine != "native":
        raise ConfigError(
            f"lengths={kind} has no effect on {setup.engine}, whose times are predicted from mean lengths: give these "
            "as --isl and --osl or, where those are the longest, length_ratio (0.9 for 0.8 to 1); --engine native "
            "follows every request"
        )
    if setup.length_ratio != 1:
        raise ConfigError("length_ratio and lengths both say how lengths vary; leave one of them out")
    count = setup.concurrency * setup.waves
    return sample_lengths(prompt_random(SEED), count, (setup.isl, isl_spread), (setup.osl, osl_spread), kind)


def parse_concurrencies(text: str) -> list[int]:
    """Return the clients of `64`, `1,4,16` or `1..1024` (1 and its doublings), or of both: `1,4,16..1024`."""
    counts: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,7})(?:\.\.(\d{1,7}))?", part.strip())
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 0 < first <= last <= MOST_CLIENTS:
            raise ConfigError(f"--concurrency: expected clients such as 64, 1,4,16 or 1..1024, got {text[:60]!r}")
        counts += [first << power for power in range((last // first).bit_length())]
    return list(dict.fromkeys(counts))


def serving_setup_of(config: RunConfig, engine: str = "native", rates: Rates | None = None) -> ServingSetup:
    """Return the description of a resolved inference run; `rates`: measured by `probe`."""
    work = config.workload
    if not isinstance(work, Inference):
        raise ConfigError(f"{config.name} is not an inference run; leave out --task serve")
    split, dtype = config.parallel, config.precision.dtype
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, [name for name in DTYPES if name])
    dp = split.tp if work.attention_dp else 1
    ep = split.ep if config.model.experts else 1
    return ServingSetup(
        shape=run_shape(config.model),
        gpu=config.machine.gpu,
        dtype=DTYPES[dtype],
        kv_dtype=config.precision.kv_dtype if config.precision.kv_dtype in KV_DTYPES else "bf16",
        isl=work.isl,
        osl=work.osl,
        concurrency=min(work.concurrency, work.num_requests),
        tp=split.tp // dp,
        pp=split.pp,
        attention_dp=dp,
        ep=ep,
        moe_tp=split.tp // ep if config.model.experts else 1,
        engine=engine,
        max_num_tokens=work.max_num_tokens,
        max_batch_size=work.max_batch_size,
        memory_fraction=work.kv_fraction,
        waves=max(1, min(WAVES, work.num_requests // work.concurrency)),
        lengths=run_lengths(work) if engine == "native" else (),
        draft_tokens=work.speculative_tokens,
        draft_shape=None if work.draft_model is None else run_shape(work.draft_model),
        draft_acceptance=work.draft_acceptance or (1.0,) * work.speculative_tokens,  # not stated: at most all
        attention_dtype=config.precision.attention_dtype if engine == "native" else None,
        fp8_recipe=config.precision.fp8_recipe,
        rates=rates,
        gpu_memory_bytes=None if config.machine.gpu in FABRICS else memory_bytes(config.machine),
    )
