"""The profiled steps of a run, and the window that Nsight Systems records around them.

A rank under `nsys profile` opens and closes the window itself; the launcher sets an environment variable to say so.
nsys waits for cudaProfilerStart and stops at cudaProfilerStop, so a report contains exactly these steps. torch's own
profiler would compete for the same CUPTI hooks and stays off.
"""

import os

import torch

from llmb.config.spec import NSIGHT_VARIABLE, Profile
from llmb.errors import ConfigError


def profiled_steps(settings: Profile, steps: range) -> range:
    """Return the steps of this run inside the profile window; an empty window is refused before the run."""
    if not settings.profile:
        return range(0)
    window = range(max(settings.profile_start, steps[0]), min(settings.profile_stop, steps[-1] + 1))
    if not window:
        raise ConfigError(
            f"profile_start={settings.profile_start}, profile_stop={settings.profile_stop}: none of the steps of this "
            f"run, {steps[0]} to {steps[-1]}, is profiled; profile_stop is the first step after the window"
        )
    return window


def is_under_nsight() -> bool:
    """Return whether this process runs under nsys."""
    return os.environ.get(NSIGHT_VARIABLE) == "1"


def check_gpu_metrics(settings: Profile) -> None:
    """Refuse GPU metrics outside Nsight Systems, which alone can sample them."""
    if settings.gpu_metrics and not is_under_nsight():
        raise ConfigError("the native engine does not run gpu_metrics=true (needs Nsight Systems)")


class NsightWindow:
    """Capture range of Nsight Systems: call `before` and `after` each step."""

    def __init__(self, steps: range):
        self._steps = steps
        self.is_open = False

    def before(self, step: int) -> None:
        """Open the window before the first profiled step."""
        if self._steps and step == self._steps[0]:
            torch.cuda.synchronize()  # kernels launched by earlier steps must not fall into the window
            torch.cuda.profiler.start()
            self.is_open = True

    def after(self, step: int) -> None:
        """Close the window after the last profiled step."""
        if self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Close the window if it is open, as when the run ends early."""
        if self.is_open:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            self.is_open = False
