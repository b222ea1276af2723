"""Injects the faults of a run's plan into this rank; detection and restart are those of real faults.

    faults = FaultInjector(config, recorder)
    faults.before_step(step)                     rank_killed, node_lost, hang, slow_rank
    faults.during_checkpoint(step, folder)       checkpoint_interrupted, disk_full: in the thread that writes it

Each is recorded as a FaultInjected before it strikes. Without a plan nothing happens.
"""

import errno
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from llmb.config.faults.fault_plan import CHECKPOINT_KINDS, Fault
from llmb.config.spec import RunConfig
from llmb.events import FaultInjected
from llmb.runtime.recorder import EventRecorder


class FaultInjector:
    """The faults of the plan that earlier starts of the run have not injected."""

    def __init__(self, config: RunConfig, recorder: EventRecorder):
        plan = config.fault_injection
        self._recorder = recorder
        self._node_ranks = min(config.machine.gpus_per_node, config.machine.gpus)
        self._pending = {} if plan is None else dict(plan.pending())
        self._slow: list[Fault] = []

    def before_step(self, step: int) -> None:
        """Inject the fault that strikes this rank as the step begins."""
        for index, fault in self._due(step):
            if fault.kind in CHECKPOINT_KINDS or self._recorder.rank not in self._ranks(fault):
                continue
            self._record(index, fault)  # by each rank of a lost node: the first to die ends the others
            if fault.kind == "hang":
                _sleep_for_ever()
            elif fault.kind == "slow_rank":
                self._slow.append(fault)
            else:
                _kill_this_process()
        for fault in self._slow:
            if step < fault.step + fault.slow_steps:
                time.sleep(fault.slow_s)

    def strikes_checkpoint(self, step: int) -> bool:
        """Return whether the checkpoint after this step is struck, on any rank: all then wait for its end.

        Else a rank could reach a fault of the next step first.
        """
        return any(fault.kind in CHECKPOINT_KINDS for _, fault in self._due(step))

    def during_checkpoint(self, step: int, folder: Path) -> None:
        """Inject the fault that strikes this rank's shards in `folder`, when they are written and not yet committed.

        An interrupted write leaves half of a file, a full disk raises its OSError.
        """
        for index, fault in self._due(step):
            if fault.kind not in CHECKPOINT_KINDS or self._recorder.rank != fault.rank:
                continue
            self._record(index, fault)
            if fault.kind == "disk_full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            for shard in folder.glob(f"__{fault.rank}_*"):
                os.truncate(shard, shard.stat().st_size // 2)
            _kill_this_process()

    def _due(self, step: int) -> list[tuple[int, Fault]]:
        return [(index, fault) for index, fault in self._pending.items() if fault.step == step]

    def _ranks(self, fault: Fault) -> range:
        """Return the ranks that a fault strikes: all of its node, or one."""
        if fault.kind != "node_lost":
            return range(fault.rank, fault.rank + 1)
        size = fault.node_ranks or self._node_ranks
        first = fault.rank // size * size
        return range(first, first + size)

    def _record(self, index: int, fault: Fault) -> None:
        del self._pending[index]
        kind, step = fault.kind, fault.step
        print(f"fault injected on purpose: {kind} at step {step} on rank {self._recorder.rank}", flush=True)
        self._recorder.add(FaultInjected(time=time.time(), rank=fault.rank, fault=index, kind=kind, step=step))


def _kill_this_process() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be handled")


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)
