"""Settings of an inference run: which follow from others, and which contradict each other.

Names in messages are those of the environment variables, as the documents print them; `--set` takes the fields of
spec.py, which are the same in small letters.
"""

from collections.abc import Collection, Sequence
from math import gcd

from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe, Row
from llmb.config.spec import Inference, Model, Override, Precision, RunConfig
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import gpu

IN_BLOCKS = ("deepseek",)  # published with one scale for 128 x 128 weights
BLOCK = 128


def without_printed_lengths(recipe: Recipe, wishes: Sequence[Setting]) -> list[Setting]:
    """The wishes of a stand-in: `chat:128/128` names the printed use case, whose lengths the stand-in scales down."""
    named = next((w for w in reversed(wishes) if w.field == "use_case"), None)
    asked = {w.field: str(w.value) for w in wishes if named and w.source == named.source}
    printed = {(row["use_case"], str(row["isl"]), str(row["osl"])) for row in recipe.rows}
    if named is None or (str(named.value), asked.get("isl"), asked.get("osl")) not in printed:
        return list(wishes)
    return [w for w in wishes if w.field not in ("isl", "osl") or w.source != named.source]


def follow(cells: Row, row: Row, asked: Collection[str]) -> list[Override]:
    """What a change drags along by the row's own rules.

    Concurrency is max_batch_size x schedulers and a run has a multiple of it in requests, where the row has it so.
    """
    changes: list[Override] = []
    wanted = _in_all(cells)
    if "concurrency" not in asked and row["concurrency"] == _in_all(row) != wanted:
        changes.append(_followed(cells, "concurrency", wanted, "max_batch_size x the ranks with requests of their own"))
    rounds, rest = divmod(row["num_requests"], row["concurrency"])
    if "num_requests" not in asked and not rest and rounds > 1 and cells["concurrency"] != row["concurrency"]:
        changes.append(_followed(cells, "num_requests", rounds * cells["concurrency"], f"{rounds} x concurrency"))
    return changes


def _in_all(cells: Row) -> int:
    """Requests that all schedulers compute at once."""
    return cells["max_batch_size"] * (cells.get("tp", 1) if cells.get("attention_dp") else 1)


def _followed(cells: Row, field: str, value: int, source: str) -> Override:
    change = Override(field=field, value=value, replaced=cells[field], source=source)
    cells[field] = value
    return change


def block_scales_fit(model: Model) -> bool:
    """Whether every product of the model sums over whole blocks of 128."""
    return _common_width(model, 1) % BLOCK == 0


def _common_width(model: Model, ranks: int) -> int:
    """What divides the inputs of all products, as one of so many ranks has them; an output may end within a block."""
    widths = [model.hidden, model.heads * (model.latent.value_dim if model.latent else model.head_dim) // ranks]
    if model.latent is not None:
        widths += [model.latent.q_rank, model.latent.kv_rank]
    if model.blocks.get("mlp"):
        widths.append(model.ffn // ranks)
    if model.experts is not None:
        widths.append(model.experts.ffn)
    if model.mamba is not None:
        widths.append(model.mamba.heads * model.mamba.head_dim // ranks)
    return gcd(*widths)


def check_settings(config: RunConfig, asked: Collection[str]) -> None:
    """The first contradiction among the settings, with what would resolve it; `asked` are fields the user set."""
    work = config.workload
    assert isinstance(work, Inference)
    _check_lengths(work)
    _check_step(work)
    if work.mode == "min_latency":
        _check_alone(work)
    if work.attention_dp and config.parallel.tp == 1 and "attention_dp" in asked:
        raise ConfigError("attention_dp has no effect on one rank; raise TP or leave it out")
    if work.prefix_cache and config.model.blocks.get("mamba"):
        raise ConfigError(f"prefix_cache: the Mamba state of {config.model.name} cannot be shared; leave it out")
    _check_precision(config)


def _check_lengths(work: Inference) -> None:
    for name, length, spread in (("isl", work.isl, work.isl_spread), ("osl", work.osl, work.osl_spread)):
        if spread and work.lengths == "fixed":
            raise ConfigError(f"{name}_spread has no effect with lengths=fixed; set lengths=normal or lengths=uniform")
        if spread >= length:
            raise ConfigError(f"{name}_spread {spread:g} must be less than {name} {length}: no request is empty")


def _check_step(work: Inference) -> None:
    """Whether a batch, and a prompt that may not be cut, is within a step's tokens."""
    longest = work.isl + (int(work.isl_spread) if work.lengths == "uniform" else 0)
    if longest > work.max_num_tokens and not work.chunked_prefill and work.dataset is None:
        raise ConfigError(
            f"prompts of {longest} tokens exceed MAX_NUM_TOKENS={work.max_num_tokens} and may not be cut; "
            f"set MAX_NUM_TOKENS={longest} or ENABLE_CHUNKED_PREFILL=true"
        )
    if work.max_batch_size > work.max_num_tokens:
        raise ConfigError(
            f"MAX_BATCH_SIZE={work.max_batch_size} requests need a token each, MAX_NUM_TOKENS={work.max_num_tokens} a "
            f"step are fewer; set MAX_BATCH_SIZE={work.max_num_tokens} or MAX_NUM_TOKENS={work.max_batch_size}"
        )


def _check_alone(work: Inference) -> None:
    """A latency run has one request at a time and streams it."""
    way_out = "leave it out or set MODE=max_throughput"
    for variable, value in (("MAX_BATCH_SIZE", work.max_batch_size), ("CONCURRENCY", work.concurrency)):
        if value != 1:
            raise ConfigError(f"{variable}={value}: MODE=min_latency has one request at a time; {way_out}")
    if not work.streaming:
        raise ConfigError(f"STREAMING=false: MODE=min_latency measures each token; {way_out}")
    if work.attention_dp:
        raise ConfigError("attention_dp: MODE=min_latency has one request, which cannot be dealt to several ranks")


def _check_precision(config: RunConfig) -> None:
    precision, model = config.precision, config.model
    hardware = gpu(config.machine.gpu)
    for name in ("dtype", "kv_dtype"):
        if getattr(precision, name) == "fp8" and hardware.peak_flops and "fp8" not in hardware.peak_flops:
            raise ConfigError(f"{name} fp8: {hardware.title} does not compute in 8 bits; choose bf16")
    if precision.fp8_scaling is None:
        return
    if precision.dtype != "fp8":
        raise ConfigError(f"fp8_scaling has no effect with dtype {precision.dtype}; use dtype fp8 or leave it out")
    ranks = 1 if _work(config).attention_dp else config.parallel.tp
    if precision.fp8_scaling == "block" and _common_width(model, ranks) % BLOCK:
        common = _common_width(model, ranks)
        raise ConfigError(
            f"fp8_scaling=block scales 128 channels at a time, the widths of {model.name} on {ranks} rank(s) are "
            f"multiples of {common} only; choose fp8_scaling=channel or tensor"
        )


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload


def scaling_of_stand_in(model: Model, precision: Precision) -> tuple[Precision, str | None]:
    """A stand-in too narrow for the blocks its model is published in has scales a channel; says so."""
    narrow = model.architecture in IN_BLOCKS and not block_scales_fit(model)
    if precision.dtype != "fp8" or precision.fp8_scaling is not None or not narrow:
        return precision, None
    return Precision(dtype="fp8", kv_dtype=precision.kv_dtype, fp8_scaling="channel"), "scales a channel, not a block"
