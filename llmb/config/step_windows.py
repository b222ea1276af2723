"""Windows of steps: those that are measured, and those that a profiler or the NCCL trace covers."""

from llmb.config.recipe import Row
from llmb.config.spec import Override, Profile
from llmb.errors import ConfigError

PROFILE_DETAILS = ("profiler", "profile_start", "profile_stop", "profile_ranks", "gpu_metrics")
NCCL_TRACE_STEPS = 5  # its log grows by gigabytes


def shorten_trace(values: Row, overrides: list[Override]) -> None:
    """Limit a run that traces every collective to a few steps, unless the user sets `steps`."""
    steps = values.get("steps", 0)
    if values.get("nccl_trace") and steps > NCCL_TRACE_STEPS and "steps" not in {o.field for o in overrides}:
        overrides.append(Override(field="steps", value=NCCL_TRACE_STEPS, replaced=steps, source="ENABLE_NCCLTRACE"))
        values["steps"] = NCCL_TRACE_STEPS


def fit_window(values: Row, overrides: list[Override]) -> None:
    """Fit the measured and the profiled steps to the number of steps, except where the user sets them.

    With more steps than the recipe has, the window keeps its first step and ends with the run, or before the profiled
    steps; with fewer, it begins in the middle of the run at the latest.
    """
    if "steps" not in values:
        return
    steps, overridden = values["steps"], {o.field for o in overrides}
    if steps < 1:
        raise ConfigError("steps: at least 1 is needed")
    if len(values.get("window") or ()) != 2:
        raise ConfigError("window: expected the first and last step that count, such as 35-44")
    first, last = values["window"]
    if not 1 <= first <= last:
        raise ConfigError(f"window: {first}-{last} is not a range of steps, first to last")
    if last > steps and "window" in overridden:
        raise ConfigError(f"window: {first}-{last} ends after the last step, {steps}")
    if values.get("profile_stop", 0) > steps and not overridden & {"profile_start", "profile_stop"}:
        start = max(1, steps - 5)
        values["profile_start"], values["profile_stop"] = start, max(start + 1, steps)
    if "window" not in overridden:
        recipe_steps = next((o.replaced for o in overrides if o.field == "steps"), None) or steps
        _follow_steps(values, overrides, recipe_steps)


def _follow_steps(values: Row, overrides: list[Override], recipe_steps: int) -> None:
    steps, (first, last) = values["steps"], values["window"]
    if last > steps:
        window = [min(first, steps // 2 + 1), steps]
    elif steps > recipe_steps:
        profile_start = values.get("profile_start", Profile.profile_start)
        profiled = values.get("profile") and last < profile_start <= steps
        window = [first, profile_start - 1 if profiled else steps]
    else:
        return
    source = "fewer steps" if last > steps else "more steps"
    overrides.append(Override(field="window", value=window, replaced=[first, last], source=source))
    values["window"] = window


def refuse_without_effect(values: Row, overrides: list[Override], ranks: int) -> None:
    for override in overrides:
        if override.field in PROFILE_DETAILS and not values.get("profile"):
            name = override.source.removeprefix("environment ")
            raise ConfigError(
                f"{name}: {override.field} has no effect without profiling; add -p or ENABLE_PROFILE=true"
            )
    if absent := [rank for rank in values.get("profile_ranks", ()) if not 0 <= rank < ranks]:
        raise ConfigError(f"profile_ranks: there is no rank {absent[0]}; the run has ranks 0 to {ranks - 1}")
    if values.get("profile") and values.get("nccl_trace"):
        raise ConfigError("profiling and the NCCL trace exclude each other; choose -p or ENABLE_NCCLTRACE=true")
    start, stop = values.get("profile_start", Profile.profile_start), values.get("profile_stop", Profile.profile_stop)
    if values.get("profile") and (start >= stop or start > values.get("steps", start)):
        last = f" and the run ends with step {values['steps']}" if "steps" in values else ""
        raise ConfigError(
            f"profile_start={start}, profile_stop={stop}: no step is profiled; profile_stop is the first step after "
            f"the window{last}"
        )
