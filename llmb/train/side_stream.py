"""A second CUDA stream, for copies and collectives that overlap with computation; on the CPU all is synchronous."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """CUDA stream beside the main one."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run what is launched inside on this stream, after all kernels launched on the main stream so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event after everything launched so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the main stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
