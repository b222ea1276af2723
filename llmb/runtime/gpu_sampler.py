"""Samples of this rank's GPU during a run, twice a second from a thread, written as GpuSample events.

    with GpuSampler(recorder, device) as sampler:
        ...                                  # samples are recorded
        sampler.measured = True              # and say from now on that they are of the measured interval

On a CPU, or without NVML, nothing is sampled and `note` says why. The thread waits for the driver without the GIL; its
own CPU time stands in every sample, so that each result states what the sampling cost.
"""

import threading
import time

import torch

from llmb.events import GpuSample
from llmb.runtime.nvml_gpu import GpuReader, open_gpu
from llmb.runtime.recorder import EventRecorder

INTERVAL_S = 0.5  # between two samples


class GpuSampler:
    """Context manager around a run."""

    def __init__(
        self,
        recorder: EventRecorder,
        device: torch.device,
        measured: bool | None = None,
        gpu: GpuReader | None = None,
        interval_s: float = INTERVAL_S,
    ):
        self.measured = measured
        self.note: str | None = None  # why nothing is sampled
        self.gpu = gpu
        self.powers: list[tuple[float, float]] = []  # seconds of perf_counter, watts
        self._recorder, self._interval_s = recorder, interval_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="gpu-sampler", daemon=True)
        if gpu is None:
            try:
                self.gpu = open_gpu(device)
            except LookupError as error:
                self.note = str(error)

    def __enter__(self) -> "GpuSampler":
        if self.gpu is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.gpu is not None:
            self._thread.join(timeout=2.0)  # a driver that does not return must not keep the run from ending

    def sample(self, read_s: float | None = None) -> None:
        """Take one sample now."""
        if self.gpu is None:
            return
        with self._lock:
            state = self.gpu.state()
            if state.power_w is not None:
                self.powers.append((time.perf_counter(), state.power_w))
            self._recorder.add(
                GpuSample(
                    time=time.time(), rank=self._recorder.rank, measured=self.measured, **vars(state), read_s=read_s
                )
            )

    def _sample_until_stopped(self) -> None:
        read_s = None
        while not self._stop.is_set():
            start = time.thread_time()
            try:
                self.sample(read_s)
            except OSError:  # a full disk ends the run at its next step
                return
            read_s = time.thread_time() - start
            self._stop.wait(self._interval_s)
