"""PyTorch profiler trace of some steps of the measured phase: profile/trace.rank<N>.json.gz.

    llmb-run submit ... -p        engine steps profile_start up to, not including, profile_stop, counted from 0

Open it in chrome://tracing or ui.perfetto.dev. Traced steps are slower, which shows in the measured results.
Where Nsight Systems watches instead (rank/nsight.py), its window is opened and closed around the same steps.
"""

import os
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from llmb.config.spec import Profile
from llmb.errors import ConfigError, LaunchError
from llmb.runtime.profile_window import NsightWindow, is_under_nsight
from llmb.runtime.rank_info import RankInfo

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else Kineto logs to stderr


class StepTrace:
    """Call `before` and `after` each step, and `close` after the last."""

    def __init__(self, folder: Path, settings: Profile, rank_info: RankInfo):
        if not 0 <= settings.profile_start < settings.profile_stop:
            raise ConfigError(
                f"profile_start={settings.profile_start}, profile_stop={settings.profile_stop}: no step is profiled; "
                "profile_stop is the first step after the window"
            )
        self.path = folder / "profile" / f"trace.rank{rank_info.rank}.json.gz"
        self._steps = range(settings.profile_start, settings.profile_stop)
        self._device = rank_info.device
        self._trace: profile | None = None
        if settings.profile_ranks and rank_info.rank not in settings.profile_ranks:
            self._steps = range(0)
        self._nsight = NsightWindow(self._steps) if is_under_nsight() else None

    def before(self, step: int) -> None:
        """Start the profiler at the beginning of the window."""
        if self._nsight is not None:
            self._nsight.before(step)
        elif self._steps and step == self._steps[0]:
            on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._trace.start()

    def after(self, step: int) -> None:
        """Write the trace at the end of the window."""
        if self._nsight is not None:
            self._nsight.after(step)
        elif self._steps and step == self._steps[-1]:
            self._write()

    def close(self) -> None:
        """End the trace with the phase, which may end before the window."""
        self._write()
        if self._nsight is not None:
            self._nsight.close()
        elif self._steps and not self.path.exists():
            first, last = self._steps[0], self._steps[-1]
            print(f"profile: nothing was traced, the phase ended before step {first} of {first} to {last}", flush=True)

    def _write(self) -> None:
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        try:
            self.path.parent.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(self.path))
        except OSError as error:
            raise LaunchError(f"cannot write {self.path}: {error.strerror}") from error
