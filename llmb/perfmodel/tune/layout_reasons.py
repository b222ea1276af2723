"""Why one layout is faster than another: the settings that differ and the terms of the step time that change.

setting_changes(recipe, best)          -> {"tp": (8, 4), "pp": (8, 16)}
term_changes(terms, best_terms)        -> {"dp": -0.85, "bubble": 0.15}, largest first
"""

from collections.abc import Mapping

from llmb.perfmodel.step_time.step_setup import StepSetup

NOTICEABLE = 0.003  # of the step time, to be named as a reason


def layout_fields(setup: StepSetup) -> dict[str, int | bool]:
    """Return the searched settings of a run, under the names of --set."""
    split = setup.parallel
    ep, etp = (split.ep, split.etp) if setup.shape.model.experts else (1, 1)
    return {
        "tp": split.tp, "pp": split.pp, "vp": split.vp or 1, "cp": split.cp, "ep": ep, "etp": etp,
        "fsdp": split.fsdp, "mbs": setup.mbs, "recompute_layers": setup.recomputed_layers,
        "offload_layers": setup.offload_layers,
    }  # fmt: skip


def setting_changes(before: StepSetup, after: StepSetup) -> dict[str, tuple[int | bool, int | bool]]:
    """Return the searched settings that differ, with both values."""
    old, new = layout_fields(before), layout_fields(after)
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


def term_changes(
    before: Mapping[str, float], after: Mapping[str, float], noticeable: float = NOTICEABLE
) -> dict[str, float]:
    """Return by how much each noticeable term changes, largest change first."""
    smallest = noticeable * sum(before.values())
    changes = {name: after[name] - before[name] for name in before}
    names = sorted(changes, key=lambda name: -abs(changes[name]))
    return {name: changes[name] for name in names if abs(changes[name]) >= smallest}
