"""Layouts of a training run that are worth predicting: what divides the model, the batch and the GPUs.

    for setup in layout_space(base, {"tp": 8}): ...      every layout with tp 8; nothing is recomputed or offloaded

Besides divisibility (`config/parallel_layout.py`) a layout obeys what clusters and engines impose:

- tp stays inside an NVLink domain, as its collectives are on the critical path of every block.
- etp is tp or 1: experts are split like the dense layers, or not at all; always like them in Megatron of 2024.
- Experts are split, and a rank holds at most 16 of them where there are ranks enough. No published run does otherwise:
  without all-to-all, with many small GEMMs and launches, the prediction would be a guess.
- cp leaves every rank chunks of 512 tokens or more, two each: shorter ones hide no ring behind their attention.
- Interleaving does not make the fullest pipeline rank fuller: 126 layers over 8 x 8 stages are at most 16 a rank, as
  over 8, but 80 over 8 x 4 would be 12 instead of 10. Hybrids are not interleaved, as their layers differ in cost.
- Stages of a hybrid have equally many layers in Megatron before 2026, whose hybrid stack splits no other way.
- A pipeline has a micro-batch for every stage; interleaved, in whole rounds of pp.
- fsdp is combined with neither a pipeline nor experts, except in torchtitan and the native engine: Megatron's gathers
  all weights of a rank for every micro-batch, and no published run of it does either. Megatron of 2024 had none.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from llmb.config.parallel_layout import check_model, check_sequence, divisors
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.step_time.measured_device import device_of
from llmb.perfmodel.step_time.step_setup import StepSetup

DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp")
MOST_LOCAL_EXPERTS = 16  # of a rank
FEWEST_TOKENS = 1024  # of a sequence on each of cp ranks
MOST_MICRO_BATCH = 16  # sequences: beyond, only memory grows
SPLITS_EXPERTS_BY_TP = ("megatron-2024",)  # engines without an etp of its own
WITHOUT_FSDP = ("megatron-2024",)  # NeMo 24.09 to 25.02: the optimizer state is sharded, weights are not
EVEN_HYBRIDS = ("megatron", "megatron-2024", "megatron-bridge")  # whose stages of hybrids have equally many layers
FSDP_ANYWHERE = ("torchtitan", "native")  # engines that shard the weights of pipeline stages and of experts
Fixed = Mapping[str, Any]

_divisors = cache(divisors)


def layout_space(base: StepSetup, fixed: Fixed) -> Iterator[StepSetup]:
    """Yield the run with every possible layout and micro-batch size, apart from what is fixed."""
    for parallel in layouts(base, fixed):
        sequences = base.gbs // parallel.dp
        for mbs in _values(fixed, "mbs", range(1, min(sequences, MOST_MICRO_BATCH) + 1)):
            if sequences % mbs == 0 and _has_schedule(parallel, sequences // mbs):
                yield replace(
                    base, parallel=parallel, fsdp_ranks=None, mbs=mbs, recompute="none", recompute_layers=None,
                    recompute_modules=(), offload_layers=0,
                )  # fmt: skip


def layouts(base: StepSetup, fixed: Fixed) -> Iterator[Parallel]:
    """Yield every parallel layout of the model, sequence and batch on these GPUs."""
    for tp, cp in _sequence_splits(base, fixed):
        for pp in _values(fixed, "pp", _divisors(base.gpus)):
            dp, remainder = divmod(base.gpus, tp * cp * pp)
            if remainder or base.gbs % dp or pp > base.layer_count or _is_uneven_hybrid(base, pp):
                continue
            for ep, etp in _expert_splits(base, fixed, tp, dp * cp * tp):
                for vp, fsdp in _pipelines(base, fixed, pp, dp * cp):
                    yield Parallel(dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vp=vp)


def check_fixed(base: StepSetup, fixed: Fixed) -> None:
    """Refuse fixed degrees that no layout can have, with the values that are possible."""
    degrees = Parallel(**{name: fixed[name] for name in DEGREES if name in fixed and name != "vp"})
    check_model(degrees, base.shape.model)
    check_sequence(base.seqlen, degrees)
    for name, degree in (("pp", degrees.pp), ("tp x cp", degrees.tp * degrees.cp)):
        if base.gpus % degree:
            raise ConfigError(f"{name} = {degree} does not divide {base.gpus} GPUs")


def _sequence_splits(base: StepSetup, fixed: Fixed) -> Iterator[tuple[int, int]]:
    """Yield tp and cp."""
    model, domain = base.shape.model, device_of(base.gpu, base.rates).fabric.link_domain
    for tp in _values(fixed, "tp", range(1, min(domain, base.gpus) + 1)):
        if base.gpus % tp or not _is_possible(check_model, Parallel(tp=tp), model):
            continue
        shortest = [cp for cp in _divisors(base.gpus // tp) if cp == 1 or base.seqlen // cp >= FEWEST_TOKENS]
        for cp in _values(fixed, "cp", shortest):
            split = Parallel(tp=tp, cp=cp)
            if _is_possible(check_sequence, base.seqlen, split) and _is_possible(check_model, split, model):
                yield tp, cp


def _expert_splits(base: StepSetup, fixed: Fixed, tp: int, stage_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield ep and etp."""
    model = base.shape.model
    widths = (tp,) if base.engine in SPLITS_EXPERTS_BY_TP else dict.fromkeys((1, tp))
    if model.experts is None:
        yield 1, 1
        return
    most = max(MOST_LOCAL_EXPERTS, model.experts.count // base.gpus)
    few_enough = [ep for ep in _divisors(model.experts.count) if model.experts.count // ep <= most]
    for ep in _values(fixed, "ep", few_enough):
        for etp in _values(fixed, "etp", widths):
            is_split = ep * etp > 1 or 1 in (base.gpus, model.experts.count) or "ep" in fixed
            if is_split and stage_ranks % (ep * etp) == 0 and model.experts.ffn % etp == 0:
                yield ep, etp


def _pipelines(base: StepSetup, fixed: Fixed, pp: int, replicas: int) -> Iterator[tuple[int | None, bool]]:
    """Yield vp and fsdp."""
    most = -(-base.layer_count // pp)  # layers of the fullest rank
    model = base.shape.model
    alone = pp == 1 and model.experts is None and base.engine not in WITHOUT_FSDP
    may_shard = base.engine in FSDP_ANYWHERE or alone
    for vp in _values(fixed, "vp", range(1, most + 1)):
        stages = pp * vp
        if vp > 1 and (
            pp == 1 or model.pattern or stages > base.layer_count or -(-base.layer_count // stages) * vp > most
        ):
            continue
        for fsdp in _values(fixed, "fsdp", (False, True)):
            if not fsdp or (replicas > 1 and (may_shard or "fsdp" in fixed)):
                yield (vp if vp > 1 else None), fsdp


def _is_uneven_hybrid(base: StepSetup, pp: int) -> bool:
    return base.shape.model.pattern is not None and base.engine in EVEN_HYBRIDS and base.layer_count % pp > 0


def _has_schedule(parallel: Parallel, ga: int) -> bool:
    if parallel.pp == 1:
        return True
    return ga >= parallel.pp and (parallel.vp is None or ga % parallel.pp == 0)


def _values(fixed: Fixed, name: str, values: Any) -> Any:
    """Return the one value that is fixed, or all."""
    return (fixed[name],) if name in fixed else values


def _is_possible(check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments)
    except ConfigError:
        return False
    return True
