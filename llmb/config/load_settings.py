"""Settings of a load test: which server, which requests, when they are sent, which limits they should hold.

    LoadSettings(base_url="http://localhost:8000", model="llama", isl=1000, osl=1000, concurrency=32, num_requests=320)

They are the workload of a run of the engine `openai`, whose configuration is a LoadConfig: of a server that llmb did
not start, neither the GPUs nor the number formats are known unless the user names them.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from llmb.config.model import Model
from llmb.config.serialization import build
from llmb.config.spec import Inference, Limits, Machine, Parallel, Precision, RunConfig
from llmb.errors import ConfigError, UnknownName

ArrivalKind = Literal["all_at_once", "concurrency", "constant", "poisson", "gamma", "trace"]
UNIT_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "": 1.0}
SLO_EXAMPLE = "write ttft=500ms,tpot=50ms or e2e=10s"
DECIDED_FIELDS = ("model", "prompt", "messages", "stream", "max_tokens", "max_completion_tokens", "n")  # of a request
LONGEST = 10_000_000  # tokens of a request, requests of a load: beyond that a number is a mistake


@dataclass(frozen=True, kw_only=True)
class SloLimits:
    """Service-level objective (SLO): limits that a request holds all at once. Null: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None  # the largest gap of a request
    e2e_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """One load on one server."""

    kind: Literal["load"] = "load"
    base_url: str  # with or without /v1; never with a password
    model: str  # name under which the server knows it
    endpoint: Literal["completions", "chat"] = "completions"
    streaming: bool = True
    api_key_env: str | None = None  # environment variable that holds the key

    isl: int = 1000  # input tokens per request
    osl: int = 1000  # output tokens per request
    lengths: Literal["fixed", "uniform", "normal", "empirical"] = "fixed"
    isl_spread: float = 0.0  # tokens: standard deviation (normal) or half the range (uniform)
    osl_spread: float = 0.0
    lengths_file: str | None = None  # pairs of input and output length, drawn with replacement (empirical)
    dataset: str | None = None  # requests from a file: JSONL, or JSON in ShareGPT's form
    trace: str | None = None  # requests and their times from a file: Mooncake JSONL or Azure CSV
    trace_speedup: float = 1.0
    prefix_fraction: float = 0.0  # of the input tokens, shared by all requests of a group
    prefix_groups: int = 1
    turns: int = 1  # of a session; each turn sends the history of the session before it
    think_s: float = 0.0  # from the end of a turn to the next one
    prompt_format: Literal["text", "ids"] = "text"
    tokenizer: str | None = None  # folder with tokenizer.json; none: one word counts as one token
    vocab_size: int | None = None  # of token ids, where no tokenizer tells it

    arrivals: ArrivalKind = "concurrency"
    rate: float | None = None  # requests/s; of sessions, sessions/s
    burstiness: float = 1.0  # gamma: shape of the intervals; 1 is Poisson, less is burstier
    concurrency: int | None = None  # most requests in progress; with a rate, a cap
    ramp_s: float = 0.0  # rate or concurrency rises linearly over this time
    ramp_start: float = 0.0  # from this fraction of it
    num_requests: int | None = None
    duration_s: float | None = None  # no request is sent after it
    warmup_requests: int = 0

    ignore_eos: bool = True  # ask the server to produce all output tokens
    temperature: float = 0.0
    max_completion_tokens: bool = False  # the name of the output length, in place of max_tokens
    extra_body: str | None = None  # JSON object: further fields of every request; null removes one
    seed: int = 1234
    slo: SloLimits | None = None
    gpu_cost_per_hour: float | None = None  # of one GPU, in any currency
    timeout_s: float = 600.0  # of one request
    ready_timeout_s: float = 60.0  # for the server to become ready
    processes: int | None = None  # of the client; none: as many as the load needs
    calibrate: bool = True  # measure the client on a no-op server first

    @property
    def is_open_loop(self) -> bool:
        """True if requests are sent at given times, whether or not earlier ones have ended."""
        return self.arrivals in ("constant", "poisson", "gamma", "trace")


@dataclass(frozen=True, kw_only=True)
class ServedMachine(Machine):
    """GPUs behind a server; null where the user does not name them."""

    gpu: str | None = None  # type: ignore[assignment]
    gpus: int | None = None  # type: ignore[assignment]
    gpus_per_node: int | None = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class ServedPrecision(Precision):
    """Number formats of a server; null where the user does not name them."""

    dtype: str | None = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class LoadConfig(RunConfig):
    """Configuration of a load test. Its model is known by name only, and nothing else of the server for sure.

    Code that reads a RunConfig for its model or its parallel layout never receives one of these.
    """

    engine: str = "openai"
    machine: ServedMachine = ServedMachine()
    model: Model | None = None  # type: ignore[assignment]
    parallel: Parallel = field(default_factory=Parallel)
    precision: ServedPrecision = ServedPrecision()
    workload: LoadSettings  # type: ignore[assignment]


def without_credentials(url: str) -> str:
    """Return a URL without user:password@."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else url


def check_url(url: str) -> str:
    """Return a base URL in its normal form, without credentials; raise on what is none."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"base URL {without_credentials(url)!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"base URL {without_credentials(url)!r}: expected http://HOST[:PORT] or https://HOST[:PORT]")
    if parts.query or parts.fragment:
        raise ConfigError(f"base URL {without_credentials(url)!r}: expected no query and no fragment")
    return without_credentials(urlunsplit(parts)).rstrip("/").removesuffix("/v1")


def check_load(settings: LoadSettings) -> None:
    """Raise on the first contradiction between settings, before anything is sent."""
    if (url := check_url(settings.base_url)) != settings.base_url:
        raise ConfigError(f"base_url: write it as {url}, without a password or /v1")
    _check_numbers(settings)
    extra_fields(settings.extra_body)
    _check_source(settings)
    _check_arrivals(settings)


def extra_fields(text: str | None) -> dict[str, Any]:
    """Return the further fields of every request; raise on those that the load itself decides."""
    try:
        fields = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise ConfigError(f"extra_body {text!r}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"""extra_body {text!r}: expected a JSON object such as {{"min_p": 0.1, "ignore_eos": null}}"""
        )
    if decided := [name for name in fields if name in DECIDED_FIELDS]:
        raise ConfigError(f"extra_body: the load itself sets {decided[0]}; leave it out")
    return fields


def _check_numbers(settings: LoadSettings) -> None:
    if not settings.model.strip() or not settings.model.isprintable():
        raise ConfigError(f"model {settings.model!r}: expected the name under which the server knows it")
    at_least_1 = ("isl", "osl", "prefix_groups", "turns", "num_requests", "concurrency", "processes", "vocab_size")
    for name in at_least_1:
        value = getattr(settings, name)
        if value is not None and not 1 <= value <= LONGEST:
            raise ConfigError(f"{name}={value}: expected 1 to {LONGEST}")
    for name in ("rate", "burstiness", "trace_speedup", "duration_s", "timeout_s", "gpu_cost_per_hour"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value:g}: expected more than 0")
    for name in ("isl_spread", "osl_spread", "think_s", "ramp_s", "ready_timeout_s", "warmup_requests", "temperature"):
        if not 0 <= getattr(settings, name) < float("inf"):
            raise ConfigError(f"{name}={getattr(settings, name):g}: expected 0 or more")
    for name in ("prefix_fraction", "ramp_start"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ConfigError(f"{name}={getattr(settings, name):g}: expected 0 to 1")
    for name, value in vars(settings.slo).items() if settings.slo else ():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"slo {name}={value:g}: expected more than 0")


def _check_source(settings: LoadSettings) -> None:
    """Check where lengths and prompts come from."""
    sources = [name for name in ("dataset", "trace", "lengths_file") if getattr(settings, name) is not None]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)} both say which requests to send; give one of them")
    if (settings.lengths == "empirical") != (settings.lengths_file is not None):
        raise ConfigError("lengths=empirical and lengths_file need each other")
    for name, length, spread in (
        ("isl", settings.isl, settings.isl_spread),
        ("osl", settings.osl, settings.osl_spread),
    ):
        if spread and settings.lengths == "fixed":
            raise ConfigError(f"{name}_spread has no effect with lengths=fixed; set lengths=normal or lengths=uniform")
        if spread >= length:
            raise ConfigError(f"{name}_spread {spread:g} must be less than {name} {length}: no request is empty")
    if settings.prompt_format == "ids":
        if settings.endpoint == "chat":
            raise ConfigError("chat takes texts, not token ids; set prompt_format=text or endpoint=completions")
        if settings.tokenizer is None and settings.vocab_size is None and settings.dataset is None:
            raise ConfigError("token ids need a vocabulary: give a tokenizer folder or vocab_size")
    if settings.prefix_fraction and (settings.dataset or settings.trace):
        raise ConfigError("prefix_fraction shapes synthetic prompts; leave it out with a dataset or a trace")
    if settings.turns > 1 and (settings.dataset or settings.trace):
        raise ConfigError("turns make synthetic sessions; leave them out with a dataset or a trace")
    if settings.think_s and settings.turns == 1:
        raise ConfigError("think_s has no effect on one turn; set turns=2 or more")


def _check_arrivals(settings: LoadSettings) -> None:
    kind = settings.arrivals
    rated = kind in ("constant", "poisson", "gamma")
    if rated != (settings.rate is not None):
        raise ConfigError(
            f"arrivals={kind} needs a rate" if rated else f"rate has no effect with arrivals={kind}; leave it out"
        )
    if kind == "trace" and settings.trace is None:
        raise ConfigError("arrivals=trace needs a trace file")
    if kind == "concurrency" and settings.concurrency is None:
        raise ConfigError("arrivals=concurrency needs a concurrency")
    if settings.burstiness != 1 and kind != "gamma":
        raise ConfigError(f"burstiness has no effect with arrivals={kind}; choose arrivals=gamma")
    if settings.ramp_s and kind not in ("concurrency", "constant", "poisson", "gamma"):
        raise ConfigError(f"ramp_s has no effect with arrivals={kind}; give a rate or a concurrency")
    if settings.ramp_start and not settings.ramp_s:
        raise ConfigError("ramp_start has no effect without ramp_s")
    if settings.num_requests is None and settings.duration_s is None and not (settings.dataset or settings.trace):
        raise ConfigError("the load has no end: give the number of requests or a duration")
    if kind == "all_at_once" and settings.num_requests is None and not (settings.dataset or settings.trace):
        raise ConfigError("arrivals=all_at_once needs the number of requests")


def parse_latency_limits(text: str, option: str) -> dict[str, float]:
    """Parse ttft=500ms,tpot.p50=0.05s to limits in ms by name; a number without a unit is in ms. Names are free."""
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip().lower() for word in part.partition("="))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|)", value)
        if match is None or not float(match[1]) > 0:
            raise ConfigError(f"{option}: {part}: expected a time above 0; {SLO_EXAMPLE}")
        if name in limits:
            raise ConfigError(f"{option}: {name} has two limits")
        limits[name] = float(match[1]) * UNIT_MS[match[2]]
    if not limits:
        raise ConfigError(f"{option}: no limit is given; {SLO_EXAMPLE}")
    return limits


def parse_slo(text: str) -> SloLimits:
    """Parse limits of a request such as ttft=500ms,tpot=50ms,e2e=10s."""
    limits = parse_latency_limits(text, "SLO")
    names = [name.removesuffix("_ms") for name in vars(SloLimits())]
    if unknown := [name for name in limits if name not in names]:
        raise UnknownName("limit in the SLO:", unknown[0], names)
    return SloLimits(**{f"{name}_ms": limit for name, limit in limits.items()})


def load_config(
    settings: LoadSettings,
    gpus: int | None = None,
    gpu: str | None = None,
    dtype: str | None = None,
    time_limit_s: int | None = None,
) -> LoadConfig:
    """Return the configuration of a load run; what is not named about the server stays null."""
    limits = Limits() if time_limit_s is None else Limits(time_limit_s=time_limit_s)
    return LoadConfig(
        name=_run_name(settings),
        target="load",
        size=_folder_name(settings.model),
        machine=ServedMachine(gpu=gpu, gpus=gpus),
        precision=ServedPrecision(dtype=dtype),
        workload=settings,
        limits=limits,
    )


def load_settings_of(config: RunConfig | None) -> LoadSettings | None:
    """Return the load of a run on another server; None of any other run."""
    if isinstance(config, LoadConfig):
        return config.workload
    work = None if config is None or config.engine != "openai" else config.workload
    if not isinstance(work, Inference) or work.base_url is None or config is None:
        return None
    rated = work.rate is not None
    all_at_once = not rated and work.concurrency >= work.num_requests
    gamma = work.burstiness != 1
    return replace(
        row_requests(config, work, work.base_url, work.served_model or config.model.name),
        api_key_env=work.api_key_env,
        streaming=work.streaming,
        arrivals=("gamma" if gamma else "poisson") if rated else "all_at_once" if all_at_once else "concurrency",
        rate=work.rate,
        burstiness=work.burstiness if rated else 1.0,
        concurrency=None if all_at_once or rated else work.concurrency,
        num_requests=work.num_requests,
        warmup_requests=min(work.concurrency, work.num_requests)
        if work.warmup_requests is None
        else work.warmup_requests,
        slo=parse_slo(work.slo) if work.slo else None,
    )


def repeat_of(config: RunConfig, number: int) -> RunConfig:
    """Return the configuration of a repeat, from 0 on: on a server each has prompts that no cache has seen."""
    if number == 0 or load_settings_of(config) is None:
        return config
    work: Any = config.workload
    return replace(config, workload=replace(work, seed=work.seed + number))


def row_requests(config: RunConfig, work: Inference, base_url: str, model: str) -> LoadSettings:
    """Return the requests of a recipe row, as token ids, for a server; when they are sent is left open."""
    return LoadSettings(
        base_url=base_url,
        model=model,
        isl=work.isl,
        osl=work.osl,
        lengths=work.lengths,
        isl_spread=work.isl_spread,
        osl_spread=work.osl_spread,
        dataset=work.dataset,
        prompt_format="ids",
        vocab_size=config.model.vocab,
        ignore_eos=work.ignore_eos,
        temperature=work.temperature,
        seed=work.seed,
    )


def _run_name(settings: LoadSettings) -> str:
    """Return a name that describes the load and can name a folder."""
    if settings.trace or settings.dataset:
        path = settings.trace or settings.dataset or ""
        lengths = _folder_name(path.rstrip("/").rpartition("/")[2].partition(".")[0])[:40]
    elif settings.lengths_file:
        lengths = "empirical"
    else:
        lengths = f"isl{settings.isl}_osl{settings.osl}"
    arrivals = settings.arrivals if settings.rate is None else f"{settings.arrivals}{settings.rate:g}"
    limit = "" if settings.concurrency is None else f"_c{settings.concurrency}"
    amount = f"_n{settings.num_requests}" if settings.num_requests is not None else ""
    seconds = f"_{settings.duration_s:g}s" if settings.duration_s is not None else ""
    return f"load_{_folder_name(settings.model)[:80]}_{lengths}_{arrivals}{limit}{amount}{seconds}"


def _folder_name(text: str) -> str:
    """Return a text with everything replaced that cannot be part of a folder's name."""
    name = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in text)
    return name.strip(".") or "model"


def config_from_json(data: Any, where: str) -> RunConfig:
    """Build the configuration of any run from plain data."""
    workload = data.get("workload") if isinstance(data, dict) else None
    is_load = isinstance(workload, dict) and workload.get("kind") == "load"
    return build(LoadConfig if is_load else RunConfig, data, where)
