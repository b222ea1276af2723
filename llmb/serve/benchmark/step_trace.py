"""A trace of a few steps of the measured phase, by torch's profiler: profile/trace.rank<N>.json.gz.

    llmb-run submit ... -p        engine steps profile_start up to, not including, profile_stop, counted from 0

Open it in chrome://tracing or ui.perfetto.dev. Steps that are traced are slower, and so is what is measured meanwhile.
Where Nsight Systems watches instead (rank/nsight.py), its window is opened and closed around the same steps.
"""

import os
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from llmb.config.spec import Profile
from llmb.errors import ConfigError, LaunchError
from llmb.runtime.nsight_window import NsightWindow, watched_by_nsight
from llmb.runtime.rank_info import Place

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the tracing library greets on stderr


class Trace:
    """Call `before` and `after` each step, and `close` after the last."""

    def __init__(self, folder: Path, asked: Profile, place: Place):
        if not 0 <= asked.profile_start < asked.profile_stop:
            raise ConfigError(
                f"profile_start={asked.profile_start}, profile_stop={asked.profile_stop}: no step is profiled; "
                "profile_stop is the first step after the window"
            )
        self.path = folder / "profile" / f"trace.rank{place.rank}.json.gz"
        self._steps = range(asked.profile_start, asked.profile_stop)
        self._device = place.device
        self._trace: profile | None = None
        if asked.profile_ranks and place.rank not in asked.profile_ranks:
            self._steps = range(0)
        self._nsight = NsightWindow(self._steps) if watched_by_nsight() else None

    def before(self, step: int) -> None:
        """Begin where the window begins."""
        if self._nsight is not None:
            self._nsight.before(step)
        elif self._steps and step == self._steps[0]:
            on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._trace.start()

    def after(self, step: int) -> None:
        """Write the file where the window ends."""
        if self._nsight is not None:
            self._nsight.after(step)
        elif self._steps and step == self._steps[-1]:
            self._write()

    def close(self) -> None:
        """The phase is over, perhaps before the window is."""
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
