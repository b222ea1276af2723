"""Starts of a run whose ranks are forked from this process, which has torch imported: a restart takes half a second.

    run, outcome = run_with_restarts(config, run, start_ranks)

Verdict and hang detector are those of `run_local`; like torchrun, a failed rank ends the others.
"""

import gc
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

import torch
import torch._dynamo  # imported once here, as the loop and the checkpoints, not in every rank

from llmb.config.spec import RunConfig
from llmb.events import HANG_REPORT_SIGNAL, RunEnded
from llmb.launch.event_tail import EventTails, append_run_end
from llmb.launch.hang_detector import HangDetector
from llmb.launch.local import RunOutcome
from llmb.launch.run_folder import RunFolder
from llmb.launch.verdict import Verdict, finished_run_verdict, stopped_run_verdict
from llmb.serve.http.worker_processes import rendezvous_port
from llmb.train import loop, train_checkpoint  # noqa: F401
from llmb.train.__main__ import main

GRACE_S = 2.0
POLL_S = 0.01


class ForkedRanks:
    """The processes of one start."""

    def __init__(self, config: RunConfig, run: RunFolder):
        torch.set_num_threads(1)
        self._port = rendezvous_port()
        self.world = config.parallel.world_size
        self.codes: dict[int, int] = {}
        self._pids = {rank: self._fork(rank, run) for rank in range(self.world)}
        self._kill_at: float | None = None

    def reap(self) -> bool:
        """Collect exit codes, end all if one failed, and return whether any still runs."""
        for rank, pid in self._pids.items():
            if rank not in self.codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[rank] = os.waitstatus_to_exitcode(ended[1])
        if any(self.codes.values()):
            self.stop()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._signal(signal.SIGKILL)
        return len(self.codes) < self.world

    def stop(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S
            self._signal(signal.SIGTERM)

    def log(self) -> str:
        """Return what torchrun would have printed: the rank that failed first."""
        failed = ((rank, code) for rank, code in self.codes.items() if code)
        line = "torch/distributed/elastic/multiprocessing/api.py: failed (exitcode: {1}) local_rank: {0}"
        return next((line.format(*first) for first in failed), "")

    def request_hang_reports(self, pids: Collection[int]) -> None:
        for pid in pids:
            os.kill(pid, HANG_REPORT_SIGNAL)

    def cpu_time_s(self) -> None:
        return None

    def _signal(self, number: signal.Signals) -> None:
        for rank, pid in self._pids.items():
            if rank not in self.codes:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _fork(self, rank: int, run: RunFolder) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            gc.freeze()
            log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
            os._exit(main([str(run.start_config)]))
        finally:
            os._exit(3)


def start_ranks(config: RunConfig, run: RunFolder) -> RunOutcome:
    """Run one start until all its ranks have ended, and record the verdict, as run_local does."""
    began = time.monotonic()
    ranks, tails = ForkedRanks(config, run), EventTails(run)
    detector = HangDetector(config, ranks)
    stop: Verdict | None = None
    ends_before: list[RunEnded] = []
    while ranks.reap():
        for _, event in tails.new():
            detector.observe(event)
        if stop is None and (stop := detector.verdict()) is not None:
            ends_before = tails.ends
            ranks.stop()
        time.sleep(POLL_S)
    list(tails.new(finished=True))
    code = next((code for code in ranks.codes.values() if code), 0)
    rank0_end = next((end for end in tails.ends if end.rank == 0), None)
    if stop is not None:
        verdict = stopped_run_verdict(stop, ends_before, code, rank0_end)
    else:
        verdict = finished_run_verdict(code, tails.ends, ranks.log(), tails.silent, single_rank=ranks.world == 1)
    append_run_end(run.events(0), RunEnded(time=time.time(), **verdict._asdict()))
    return RunOutcome(verdict.status, verdict.reason, code, time.monotonic() - began)
