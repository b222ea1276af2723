"""Which steps of a training run are profiled, whatever watches them."""

from llmb.config.spec import Profile
from llmb.errors import ConfigError


def profiled_steps(asked: Profile, steps: range) -> range:
    """Those of the window that this run has; a profile of none is refused before the run."""
    if not asked.profile:
        return range(0)
    window = range(max(asked.profile_start, steps[0]), min(asked.profile_stop, steps[-1] + 1))
    if not window:
        raise ConfigError(
            f"profile_start={asked.profile_start}, profile_stop={asked.profile_stop}: none of the steps of this run, "
            f"{steps[0]} to {steps[-1]}, is profiled; profile_stop is the first step after the window"
        )
    return window
