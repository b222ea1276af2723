"""A recipe's parallel layout on fewer ranks: each dimension that is split there stays split here, where ranks allow.

    shrunk(Parallel(tp=8, pp=8, cp=2, vp=8, dp=8), 16)  ->  tp 2, pp 2, cp 2, vp 2, dp 2

The ranks are dealt out one prime factor at a time, the largest first. A factor goes to a dimension that keeps dividing
its degree in the recipe: to one that is still whole, in the order tp, pp, cp, dp, so that with too few ranks dp goes
first, then cp, then pp; when none is whole any more, to the one furthest below the recipe. A factor that fits nowhere
multiplies dp. The ranks of a pipeline stage are dealt to the experts by the same rule, in the order ep, etp, replicas.
On as many ranks as the recipe has, the dimensions are the recipe's own.
"""

from dataclasses import replace

from llmb.config.spec import Parallel

INTERLEAVED = 2  # virtual stages a rank: they take layers, of which a small model has few, and no ranks


def shrunk(real: Parallel, ranks: int) -> Parallel:
    """The layout of `real` for this many ranks."""
    dense = _dealt(ranks, {"tp": real.tp, "pp": real.pp, "cp": real.cp, "dp": real.dp})
    replicas = max(1, real.world_size // real.pp // (real.ep * real.etp))
    expert = _dealt(ranks // dense["pp"], {"ep": real.ep, "etp": real.etp, "replicas": replicas})
    return replace(
        real,
        tp=dense["tp"],
        pp=dense["pp"],
        cp=dense["cp"],
        dp=dense["dp"],
        ep=expert["ep"],
        etp=expert["etp"],
        vp=INTERLEAVED if dense["pp"] > 1 and (real.vp or 1) > 1 else None,
        fsdp=real.fsdp and dense["dp"] * dense["cp"] > 1,
    )


def _dealt(ranks: int, wanted: dict[str, int]) -> dict[str, int]:
    """Ranks dealt to dimensions, named in order of preference; the last takes what no other can."""
    dealt = dict.fromkeys(wanted, 1)
    for factor in _prime_factors(ranks):
        fitting = [name for name in wanted if wanted[name] % (dealt[name] * factor) == 0]
        whole = [name for name in fitting if dealt[name] == 1]
        chosen = whole[0] if whole else max(fitting, key=lambda n: wanted[n] // dealt[n], default=list(wanted)[-1])
        dealt[chosen] *= factor
    return dealt


def _prime_factors(number: int) -> list[int]:
    """Largest first."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]
