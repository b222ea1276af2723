"""Validate a parallel layout: divisibility of GPUs, heads, widths, layers, experts, sequence and batch.

Each error names the numbers that conflict and values that would work.
"""

from dataclasses import replace
from math import gcd

from llmb.config.model import Model
from llmb.config.spec import Parallel
from llmb.errors import ConfigError


def check_ranks(parallel: Parallel, gpus: int) -> Parallel:
    """Return the layout with dp set for this many GPUs; raise on the first conflict."""
    for degree in ("tp", "pp", "cp", "ep", "etp"):
        if getattr(parallel, degree) < 1:
            raise ConfigError(f"{degree}: {getattr(parallel, degree)} ranks is not possible; 1 means not split")
    if gpus < 1:
        raise ConfigError(f"scale: {gpus} GPUs is not possible; at least 1 is needed")
    _check_world(parallel, gpus)
    return replace(parallel, dp=gpus // (parallel.tp * parallel.pp * parallel.cp))


def _check_world(p: Parallel, gpus: int) -> None:
    inner = p.tp * p.pp * p.cp
    if gpus % inner:
        fits = [t for t in divisors(gpus) if gpus % (t * p.pp * p.cp) == 0]
        way_out = f"tp could be {_choices(fits)}" if fits else f"use a multiple of {inner} GPUs"
        raise ConfigError(f"tp {p.tp} x pp {p.pp} x cp {p.cp} = {inner} does not divide {gpus} GPUs; {way_out}")
    ranks_of_stage = gpus // p.pp
    if ranks_of_stage % (p.ep * p.etp):
        fits = [e for e in divisors(ranks_of_stage) if ranks_of_stage % (e * p.etp) == 0]
        raise ConfigError(
            f"ep {p.ep} x etp {p.etp} does not divide the {ranks_of_stage} ranks of a pipeline stage; "
            f"ep could be {_choices(fits)}"
        )


def check_model(parallel: Parallel, model: Model) -> None:
    """Check that the layout divides the model."""
    p = parallel
    _check_tensors(p, model)
    _check_experts(p, model)
    if p.cp > 1 and model.blocks.get("mamba"):
        raise ConfigError(f"cp {p.cp}: a Mamba layer cannot split its sequence over ranks; leave cp at 1")
    if (p.vp or 1) > 1 and p.pp == 1:
        raise ConfigError(f"vp {p.vp} has no effect without pipeline parallelism; raise pp or set vp=none")
    if p.vp is not None and p.vp < 1:
        raise ConfigError(f"vp: {p.vp} stages is not possible; none or at least 1")
    if model.layers < p.pp * (p.vp or 1):
        raise ConfigError(f"pp {p.pp} x vp {p.vp or 1} needs more layers than the {model.layers} of {model.name}")


def check_serving(parallel: Parallel, model: Model, attention_dp: bool) -> None:
    """Check that the layout can serve the model: one replica, whose ranks share requests or have their own.

    A pipeline stage has tp ranks: ep groups with different experts (`check_ranks`), each expert split in a group.
    """
    p = parallel
    if p.dp > 1:
        raise ConfigError(
            f"tp {p.tp} x pp {p.pp} = {p.tp * p.pp} ranks serve, {p.world_size} GPUs are requested; "
            f"set tp and pp so that tp x pp = {p.world_size}"
        )
    if not attention_dp:  # else attention and dense layers are replicated
        _check_tensors(p, model, replicate_kv=True)
    _check_experts(p, model)
    if model.experts is not None and model.experts.ffn % (p.tp // p.ep):
        raise ConfigError(
            f"tp {p.tp} / ep {p.ep} = {p.tp // p.ep} ranks share each expert, which does not divide its "
            f"{model.experts.ffn} channels; ep could be {p.tp}"
        )
    if model.layers < p.pp:
        raise ConfigError(f"pp {p.pp} needs more layers than the {model.layers} of {model.name}")


def _check_tensors(p: Parallel, model: Model, replicate_kv: bool = False) -> None:
    """Check what tensor parallelism splits: query and KV heads, Mamba heads and groups, MLPs, vocabulary.

    `replicate_kv`: with more ranks than KV heads, several ranks may hold the same KV head.
    """
    blocks = model.blocks
    if p.tp > 1 and model.qk_norm == "projection":
        raise ConfigError(
            f"tp {p.tp}: {model.name} norms all query heads as one (qk_norm=projection), so they cannot be split over "
            "ranks; leave tp at 1"
        )
    split = {"entries of the vocabulary": model.vocab}
    if blocks.get("attention") or blocks.get("mla"):
        replicated = replicate_kv and p.tp % model.kv_heads == 0
        split |= {"heads": model.heads} | ({} if replicated else {"key and value heads": model.kv_heads})
    if blocks.get("mlp"):
        split["channels of the MLP"] = model.ffn
    if model.mamba:
        split |= {"Mamba heads": model.mamba.heads, "Mamba groups": model.mamba.groups}
    if model.experts and model.experts.shared:
        split["channels of the shared experts"] = model.experts.shared * model.experts.ffn
    for dimension, count in split.items():
        if count % p.tp:
            fits = divisors(gcd(*split.values()))
            raise ConfigError(
                f"tp {p.tp} does not divide the {count} {dimension} of {model.name}; tp could be {_choices(fits)}"
            )


def check_tensor_split(model: Model, tp: int) -> None:
    """Refuse a tp that no engine can have, and name those that are possible."""
    if undivided := _undivided(model, tp):
        possible = [other for other in divisors(model.heads) if _undivided(model, other) is None]
        raise ConfigError(f"tp {tp} does not divide {undivided}; possible: {possible}")


def _undivided(model: Model, tp: int) -> str | None:
    """Return what tp does not divide: query heads, KV heads (of which ranks may hold the same) or MLP channels."""
    if model.heads % tp:
        return f"{model.heads} attention heads"
    if model.mla is None and model.kv_heads % tp and tp % model.kv_heads:
        return f"{model.kv_heads} key and value heads, nor is it a multiple of them"
    if model.ffn % tp and model.blocks.get("mlp"):
        return f"{model.ffn} channels of the MLP"
    return None


def check_has_experts(p: Parallel, model: Model) -> None:
    """Check that the model has experts if ep or etp is set."""
    if model.experts is None and (p.ep > 1 or p.etp > 1):
        raise ConfigError(f"ep {p.ep} and etp {p.etp} have no effect: {model.name} has no experts; leave both at 1")


def _check_experts(p: Parallel, model: Model) -> None:
    check_has_experts(p, model)
    if model.experts is None:
        return
    if model.experts.count % p.ep:
        fits = divisors(model.experts.count)
        raise ConfigError(f"ep {p.ep} does not divide {model.experts.count} experts; ep could be {_choices(fits)}")
    if p.etp > 1 and model.experts.bias:
        raise ConfigError(
            f"etp {p.etp}: the experts of {model.name} have biases, which ranks that share an expert would add each; "
            "leave etp at 1 and raise ep"
        )
    if model.experts.ffn % p.etp:
        fits = [d for d in divisors(p.etp) if model.experts.ffn % d == 0]
        raise ConfigError(
            f"etp {p.etp} does not divide the {model.experts.ffn} channels of an expert; etp could be {_choices(fits)}"
        )


def check_sequence(seqlen: int, parallel: Parallel) -> None:
    """Check that cp and tp divide the sequence.

    With cp each rank has two equal chunks, one early and one late, to balance causal attention. Sequence parallelism
    over tp splits a rank's tokens once more between the blocks.
    """
    cp, tp = parallel.cp, parallel.tp
    unit, formula = (2 * cp * tp, f"2 x cp {cp} x tp {tp}") if cp > 1 else (tp, f"tp {tp}")
    if seqlen % unit:
        nearest = max(1, seqlen // unit) * unit
        raise ConfigError(f"seqlen {seqlen} is not a multiple of {formula} = {unit}; seqlen could be {nearest}")


def check_schedule(ga: int, parallel: Parallel) -> None:
    """Check that there is a micro-batch for each pipeline stage, and equal rounds of them with interleaving."""
    pp, count = parallel.pp, f"a step has {ga} micro-batches (gbs / mbs / dp)"
    if pp > 1 and ga < pp:
        factor = -(-pp // ga)
        raise ConfigError(f"pp {pp} needs at least {pp} micro-batches, {count}; gbs {factor} times as large would do")
    if pp > 1 and (parallel.vp or 1) > 1 and ga % (ga // pp):
        raise ConfigError(f"vp {parallel.vp} takes micro-batches in rounds of pp {pp}, {count}; use a multiple of {pp}")


def accumulation_steps(gbs: int, mbs: int, dp: int) -> int:
    """Return the gradient accumulation steps ga, so that gbs = mbs * ga * dp."""
    if gbs < 1 or mbs < 1:
        raise ConfigError(f"gbs {gbs} and mbs {mbs}: both must be at least 1")
    if gbs % (mbs * dp):
        nearest = max(1, gbs // (mbs * dp)) * mbs * dp
        raise ConfigError(
            f"gbs {gbs} is not a multiple of mbs {mbs} x dp {dp} = {mbs * dp}; "
            f"gbs could be {nearest} or {nearest + mbs * dp}"
        )
    return gbs // (mbs * dp)


def stage_layers(layers: int, pp: int, vp: int | None) -> list[range]:
    """Return the layers of each pipeline stage, first to last; rank r has the stages r, r + pp, r + 2 pp and so on.

    Even if possible. Otherwise the embedding of the first stage and the head of the last count as a layer each: 126
    layers over 64 stages are 1, then 62 times 2, then 1. Remaining layers go to the two ends and then to the stages
    after the first, so that no stage is empty: 5 layers over 4 are 1, 2, 1, 1.
    """
    stages = pp * (vp or 1)
    if layers % stages == 0:
        sizes = [layers // stages] * stages
    else:
        each, remainder = divmod(layers + 2, stages)
        larger = [0, stages - 1, *range(1, stages - 1)][:remainder]
        ends = (0, stages - 1)
        sizes = [each + (stage in larger) - (stage in ends) for stage in range(stages)]
    firsts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


def max_layers_per_rank(layers: int, parallel: Parallel) -> int:
    """Return the number of layers of the pipeline rank with the most."""
    stages = stage_layers(layers, parallel.pp, parallel.vp)
    return max(sum(map(len, stages[rank :: parallel.pp])) for rank in range(parallel.pp))


def format_layout(parallel: Parallel) -> str:
    """Format a layout as `fsdp tp2 dp64`: the dimensions that are split, and their degrees."""
    degrees = ((name, getattr(parallel, name) or 1) for name in ("tp", "pp", "cp", "vp", "ep", "etp", "dp"))
    split = [f"{name}{ranks}" for name, ranks in degrees if ranks > 1]
    return " ".join([*(["fsdp"] if parallel.fsdp else []), *split]) or "one rank"


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _choices(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12]))
