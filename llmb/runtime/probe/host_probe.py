"""Host side of a machine: memory bandwidth of its cores, and the time to launch work on the device."""

import torch

from llmb.runtime.probe.repeated_calls import Measurement, finish, repeat_calls

LAUNCHES = 1000  # back to back
CPU = torch.device("cpu")


def host_memory(copied: int, duration: float) -> Measurement:
    """Measure bytes, read and written, of a copy within host memory by all threads of torch."""
    source = torch.ones(copied, dtype=torch.uint8)
    target = torch.empty_like(source)
    return repeat_calls(lambda: target.copy_(source), CPU, duration, 2.0 * copied)


def launches(device: torch.device, duration: float) -> Measurement:
    """Measure small kernels back to back: the rate at which one thread launches them, or the device starts them."""
    x = torch.zeros(1, device=device)

    def action() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return repeat_calls(action, device, duration, LAUNCHES)


def launch_and_wait(device: torch.device, duration: float) -> Measurement:
    """Measure one small kernel until the host knows that it is done, as after each sampled token."""
    x = torch.zeros(1, device=device)

    def action() -> None:
        x.add_(1)
        finish(device)

    return repeat_calls(action, device, duration, 1)
