"""The window of steps that Nsight Systems records: a rank under `nsys profile` opens and closes it by itself.

The launcher says so by a variable. nsys waits for cudaProfilerStart and stops at cudaProfilerStop, so a report holds
these steps and no others. torch's own profiler would contend for the same hooks of the driver and stays off.
"""

import os

import torch

from llmb.config.spec import NSIGHT_VARIABLE


def watched_by_nsight() -> bool:
    """Whether this process runs under nsys."""
    return os.environ.get(NSIGHT_VARIABLE) == "1"


class NsightWindow:
    """Call `before` and `after` each step."""

    def __init__(self, steps: range):
        self._steps = steps
        self.is_open = False

    def before(self, step: int) -> None:
        """Open it where the first step begins."""
        if self._steps and step == self._steps[0]:
            torch.cuda.synchronize()  # what earlier steps launched is not part of it
            torch.cuda.profiler.start()
            self.is_open = True

    def after(self, step: int) -> None:
        """Close it where the last step is done."""
        if self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """The run is over, perhaps before the window is."""
        if self.is_open:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            self.is_open = False
