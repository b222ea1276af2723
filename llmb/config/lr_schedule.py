"""Default learning-rate schedule: peak by the model's width and the batch, warm-up and cosine decay by the run's steps.

    fill_lr_steps(values)                                 values of a training run before it is built: warm-up and decay
    workload = with_default_lr(workload, model, values)   the peak, once the global batch size is known

Llama 3 was trained with peaks of 3e-4 (8B), 1.5e-4 (70B) and 8e-5 (405B): inversely proportional to the hidden size,
as the largest stable learning rate of AdamW is. Those runs have batches of 4 million tokens or more and thousands of
steps of warm-up, without which the same peak lets the loss jump. A benchmark has a small fraction of both: its peak is
smaller by the square root of the smaller fraction, but at least a tenth. What a recipe or a setting gives is kept, and
a resumed run keeps the schedule of the run that it continues.
"""

import math
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path

from llmb.config.model import Model
from llmb.config.recipe import Row
from llmb.config.serialization import read_json
from llmb.config.spec import Inference, OutOfCore, RunConfig, Training, Workload
from llmb.errors import ConfigError

LR_FIELDS = ("lr", "lr_warmup_steps", "lr_decay_steps")
REFERENCE_LR = 3e-4  # Llama 3 8B, whose hidden size and batch follow
REFERENCE_HIDDEN = 4096
REFERENCE_TOKENS = 4 * 2**20  # of a global batch
MIN_FACTOR = 0.1
MAX_LR = 3e-3  # at the reference batch, for models too narrow for the rule
MAX_WARMUP_STEPS = 2000  # what pretraining uses, however long
MIN_WARMUP_STEPS = 10  # what 50-step benchmarks use, unless it is more than half of the run


def fill_lr_steps(values: Row) -> None:
    """Add warm-up and decay where neither the recipe nor a setting gives them; refuse a decay that ends in warm-up."""
    if "steps" not in values:
        return
    for name, value in _resumed_schedule(values.get("resume")).items():
        values.setdefault(name, value)
    warmup, decay = values.get("lr_warmup_steps"), values.get("lr_decay_steps")
    if warmup is None:
        warmup = values["lr_warmup_steps"] = default_warmup_steps(decay or values["steps"])
    if "lr_decay_steps" not in values:
        values["lr_decay_steps"] = default_decay_steps(values["steps"], warmup)
    else:
        check_lr_steps(warmup, decay)


def check_lr_steps(warmup: int, decay: int | None) -> None:
    """Check that decay ends after warm-up."""
    if warmup < 0:
        raise ConfigError(f"lr_warmup_steps={warmup}: must be at least 0")
    if decay is not None and decay <= warmup:
        raise ConfigError(
            f"lr_decay_steps={decay}: must be more than lr_warmup_steps={warmup}, where the learning rate decay begins"
        )


def default_warmup_steps(steps: int) -> int:
    """Return a fifth of the steps up to the end of decay, at least 10 of them and at most half, and at most 2,000."""
    return min(MAX_WARMUP_STEPS, max(steps // 5, min(MIN_WARMUP_STEPS, steps // 2)))


def default_decay_steps(steps: int, warmup: int) -> int | None:
    """Return the last step of the run, where decay ends; none for a run that ends in warm-up."""
    return steps if steps > warmup else None


def with_default_lr(workload: Workload, model: Model, names: Collection[str]) -> Workload:
    """Return the workload with the default peak learning rate, unless `lr` is among the names that are set."""
    if isinstance(workload, Inference) or "lr" in names:
        return workload
    return replace(workload, lr=default_lr(model, configured_tokens_per_step(workload), workload.lr_warmup_steps))


def default_lr(model: Model, tokens: int, warmup: int) -> float:
    """Return the peak learning rate of a model for so many tokens a step and steps of warm-up, to two digits."""
    return float(f"{_width_lr(model) * _factor(tokens, warmup):.2g}")


def configured_tokens_per_step(workload: Training | OutOfCore) -> int:
    """Return the tokens of a global batch, which an out-of-core run takes from its plan."""
    plan = workload.plan if isinstance(workload, OutOfCore) else None
    return workload.seqlen * (plan.gbs if plan is not None else workload.gbs or 1)


def lr_sources(config: RunConfig) -> dict[str, str]:
    """Say for each field of the learning-rate schedule where its value comes from."""
    work = config.workload
    if isinstance(work, Inference):
        return {}
    tokens, span = configured_tokens_per_step(work), work.lr_decay_steps or work.steps
    decay = default_decay_steps(work.steps, work.lr_warmup_steps)
    rules = {
        "lr": (
            default_lr(config.model, tokens, work.lr_warmup_steps),
            f"{_exponent_text(_width_lr(config.model))} at hidden size {config.model.hidden}, "
            f"x {_factor(tokens, work.lr_warmup_steps):.2g} for batch and warm-up",
        ),
        "lr_warmup_steps": (default_warmup_steps(span), f"by the {span} steps"),
        "lr_decay_steps": (decay, "the last step" if decay else "the run ends in warm-up"),
    }
    settings = {o.field: o.source for o in config.overrides}
    elsewhere = "the recipe" if work.resume is None else f"the run in {work.resume}"
    return {
        name: settings.get(name) or (text if getattr(work, name) == value else elsewhere)
        for name, (value, text) in rules.items()
    }


def _width_lr(model: Model) -> float:
    return min(MAX_LR, REFERENCE_LR * REFERENCE_HIDDEN / model.hidden)


def _factor(tokens: int, warmup: int) -> float:
    fraction = min(1.0, tokens / REFERENCE_TOKENS, warmup / MAX_WARMUP_STEPS)
    return max(MIN_FACTOR, math.sqrt(fraction))


def _resumed_schedule(resume: str | None) -> Row:
    """Return the schedule of the run that a folder of checkpoints belongs to; nothing where it is not recorded."""
    for folder in () if resume is None else (Path(resume), Path(resume).parent):
        if (folder / "config.json").is_file():
            config = read_json(folder / "config.json")
            workload = config.get("workload") if isinstance(config, dict) else None
            stored = workload if isinstance(workload, dict) else {}
            return {f.name: stored.get(f.name, f.default) for f in fields(Training) if f.name in LR_FIELDS}
    return {}


def _exponent_text(rate: float) -> str:
    """Format a rate with two digits where the second is not zero: 3e-04, 7.5e-05."""
    return f"{rate:.1e}".replace(".0e", "e")
