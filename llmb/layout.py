"""Whether a parallel layout can work: divisibility of GPUs, heads, layers, experts, sequence and batch.

Each check names the numbers that clash and those that would not.
"""

from dataclasses import replace

from llmb.errors import ConfigError
from llmb.spec import Model, Parallel


def check_layout(parallel: Parallel, model: Model, gpus: int) -> Parallel:
    """The layout with dp filled in for this many GPUs, or the first clash."""
    for degree in ("tp", "pp", "cp", "ep", "etp"):
        if getattr(parallel, degree) < 1:
            raise ConfigError(f"{degree}: {getattr(parallel, degree)} ranks is not possible; 1 means not split")
    if gpus < 1:
        raise ConfigError(f"scale: {gpus} GPUs is not possible; at least 1 is needed")
    _check_world(parallel, gpus)
    _check_model(parallel, model)
    return replace(parallel, dp=gpus // (parallel.tp * parallel.pp * parallel.cp))


def _check_world(p: Parallel, gpus: int) -> None:
    inner = p.tp * p.pp * p.cp
    if gpus % inner:
        fits = [t for t in divisors(gpus) if gpus % (t * p.pp * p.cp) == 0]
        way_out = f"tp could be {_either(fits)}" if fits else f"use a multiple of {inner} GPUs"
        raise ConfigError(f"tp {p.tp} x pp {p.pp} x cp {p.cp} = {inner} does not divide {gpus} GPUs; {way_out}")
    ranks_of_stage = gpus // p.pp
    if ranks_of_stage % (p.ep * p.etp):
        fits = [e for e in divisors(ranks_of_stage) if ranks_of_stage % (e * p.etp) == 0]
        raise ConfigError(
            f"ep {p.ep} x etp {p.etp} does not divide the {ranks_of_stage} ranks of a pipeline stage; "
            f"ep could be {_either(fits)}"
        )


def _check_model(p: Parallel, model: Model) -> None:
    attends = model.blocks.get("attention") or model.blocks.get("latent_attention")
    if attends and model.heads % p.tp:
        raise ConfigError(
            f"tp {p.tp} does not divide {model.heads} heads; tp could be {_either(divisors(model.heads))}"
        )
    if model.mamba and model.mamba.heads % p.tp:
        fits = divisors(model.mamba.heads)
        raise ConfigError(f"tp {p.tp} does not divide {model.mamba.heads} Mamba heads; tp could be {_either(fits)}")
    if model.experts is None and (p.ep > 1 or p.etp > 1):
        raise ConfigError(f"ep {p.ep} and etp {p.etp} have no effect: {model.name} has no experts; leave both at 1")
    if model.experts and model.experts.count % p.ep:
        fits = divisors(model.experts.count)
        raise ConfigError(f"ep {p.ep} does not divide {model.experts.count} experts; ep could be {_either(fits)}")
    if (p.vp or 1) > 1 and p.pp == 1:
        raise ConfigError(f"vp {p.vp} has no effect without pipeline parallelism; raise pp or leave vp out")
    if p.vp is not None and p.vp < 1:
        raise ConfigError(f"vp: {p.vp} stages is not possible; none or at least 1")
    if model.layers < p.pp * (p.vp or 1):
        raise ConfigError(f"pp {p.pp} x vp {p.vp or 1} needs more layers than the {model.layers} of {model.name}")


def check_sequence(seqlen: int, cp: int) -> None:
    """Context parallelism deals each rank two equal pieces, one early and one late, so that causal work is even."""
    if cp > 1 and seqlen % (2 * cp):
        nearest = max(1, seqlen // (2 * cp)) * 2 * cp
        raise ConfigError(f"seqlen {seqlen} is not a multiple of 2 x cp {cp}; seqlen could be {nearest}")


def split_batch(gbs: int, mbs: int, dp: int) -> int:
    """Micro-batches a rank accumulates so that gbs = mbs * ga * dp."""
    if gbs < 1 or mbs < 1:
        raise ConfigError(f"gbs {gbs} and mbs {mbs}: both must be at least 1")
    if gbs % (mbs * dp):
        nearest = max(1, gbs // (mbs * dp)) * mbs * dp
        raise ConfigError(
            f"gbs {gbs} is not a multiple of mbs {mbs} x dp {dp} = {mbs * dp}; "
            f"gbs could be {nearest} or {nearest + mbs * dp}"
        )
    return gbs // (mbs * dp)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _either(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12]))
