"""Shared state of the parts of `train_gpu.py`: device, configurations of the rows, measured rates."""

from dataclasses import dataclass, field

import torch
from measure.device import DeviceReport, release_memory
from measure.device_timer import copy_bandwidth

from llmb.config.spec import RunConfig
from llmb.perfmodel.hardware import GIB
from training.train_calls import Call, MemoryCall, TimedCall, calls_of, step_seconds
from training.train_rates import has_flash4, measured
from training.train_rows import FEWEST, Row, configuration, tiny_configuration
from training.train_run import Order

TURNS_S = 1.5  # in which the calls of a row take turns
SETTLING_S = 2.0  # behind a row's first step, while clocks fall
COPIED = 4 << 30  # bytes


@dataclass(kw_only=True)
class Bench(DeviceReport):
    """One run of the program."""

    rows: tuple[Row, ...]
    parts: frozenset[str]
    steps: int | None  # of each row that count, at most; none: as many as the row says
    settings: tuple[str, ...]  # of the engine, for all rows
    tiny: bool
    seconds: dict[Call, float] = field(default_factory=dict)  # of the libraries' calls
    torch_seconds: dict[Call, float] = field(default_factory=dict)  # of those that torch brings along
    _memory: float | None = None

    def configuration(self, row: Row) -> RunConfig:
        """Return the configuration of a row."""
        if self.tiny:
            return tiny_configuration(row, self.settings)
        return configuration(row, self.gpu, self.settings)

    def order(self, row: Row, profile: bool) -> Order:
        """Return the settings of the measurement of a row."""
        steps = row.steps if self.steps is None else self.steps
        if self.tiny:
            return Order(settling_s=0.0, steps=min(steps, 2), fewest=1, seconds=1.0, profile=profile)
        return Order(
            settling_s=SETTLING_S, steps=steps, fewest=min(FEWEST, steps), seconds=row.seconds, profile=profile
        )

    def clear(self) -> None:
        """Give the device back what nothing needs any more, and say what that leaves: the next one does not have it."""
        release_memory(self.device)
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            held = torch.cuda.memory_reserved(self.device)
            print(
                f"  still held: {held / GIB:.2f} GiB by tensors, {(total - free - held) / GIB:.2f} beside", flush=True
            )

    @property
    def memory(self) -> float:
        """Bytes a second within the device; measured when it is first asked for."""
        if self._memory is None:
            size, seconds = (1 << 22, 0.01) if self.tiny else (COPIED, TURNS_S / 2)
            self._memory = copy_bandwidth(self.device, size, seconds)
            self.clear()
        return self._memory

    @property
    def has_other_libraries(self) -> bool:
        """Whether ceilings have kernels that torch does not bring along."""
        return has_flash4(self.device)

    def measure(self, config: RunConfig, torch_only: bool = False) -> list[TimedCall]:
        """Have the times of all its calls; those that are new and have a clock's, which are timed together."""
        times = self._times(torch_only)
        new = {call: count for call, count in calls_of(config).items() if call not in times}
        if new:
            times |= measured(new, self.memory, self.device, 0.02 if self.tiny else TURNS_S, torch_only)
            self.clear()
        return [call for call in new if not isinstance(call, MemoryCall)]

    def remeasure(self, config: RunConfig) -> None:
        """Time all its calls once more; of each the mean of both times counts from now on."""
        for torch_only in (False, True) if self.has_other_libraries else (False,):
            times = self._times(torch_only)
            before = {call: times.pop(call) for call in calls_of(config)}
            self.measure(config, torch_only)
            for call, seconds in before.items():
                times[call] = (seconds + times[call]) / 2

    def ceiling(self, config: RunConfig, torch_only: bool = False) -> float:
        """Tokens/s when a step is its library calls and nothing else."""
        self.measure(config, torch_only)
        work = config.workload
        return work.gbs * work.seqlen / step_seconds(config, self._times(torch_only))

    def _times(self, torch_only: bool) -> dict[Call, float]:
        return self.torch_seconds if torch_only and self.has_other_libraries else self.seconds
