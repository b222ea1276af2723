"""Verdicts on runs under torchrun: the report of one rank must not drown in torchrun's output."""

import signal
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from llmb.config.spec import Machine
from llmb.events import RunEnded, StepDone
from llmb.launch.local import RunOutcome, run_local
from llmb.launch.procfs import find_process
from llmb.launch.verdict import exit_codes, finished_run_verdict, last_lines

TORCHRUN = """\
W1115 03:18:40.814000 61 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 62 closing signal
rank 0 exits
E1115 03:18:40.816000 61 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""
INTERRUPTED = RunEnded(status="incomplete", reason="interrupted by SIGTERM")


@pytest.mark.parametrize(
    ("output", "code", "status", "reason"),
    [
        ("ValueError: bad", 1, "failed", "rank 1: exit code 1: ValueError: bad"),
        ("step 3", -11, "failed", "rank 1: killed by signal 11 (SIGSEGV)"),
        ("HIP out of memory", -6, "oom", "rank 1: HIP out of memory"),
    ],
)
@pytest.mark.parametrize("ends", [[], [INTERRUPTED]])
def test_rank_without_run_ended(output, code, status, reason, ends):
    assert finished_run_verdict(1, ends, f"{output}\n{TORCHRUN.format(code=code)}") == (status, reason, 1)


@pytest.mark.parametrize(
    ("exit_code", "log", "single_rank", "failed_rank"),
    [(1, TORCHRUN.format(code=-9), False, 1), (-9, "step 1\n", True, 0), (-9, "step 1\n", False, None)],
)
def test_rank_killed_while_the_oom_killer_was_at_work(exit_code, log, single_rank, failed_rank):
    """Whether it was a rank or torchrun itself; ranks that lost the connection to it are not the cause."""
    ends = [] if single_rank else [lost_connection(0)]
    verdict = finished_run_verdict(exit_code, ends, log, single_rank=single_rank, oom_kills=2)
    assert (verdict.status, verdict.failed_rank) == ("oom", failed_rank)
    assert "killed by the kernel's OOM killer, which ended 2 processes during the run" in verdict.reason
    assert finished_run_verdict(exit_code, ends, log, single_rank=single_rank).status == "failed"


def test_oom_kills_of_others_do_not_count():
    failed = finished_run_verdict(1, [], f"ValueError: bad\n{TORCHRUN.format(code=1)}", oom_kills=1)
    assert failed == ("failed", "rank 1: exit code 1: ValueError: bad", 1)
    assert finished_run_verdict(0, [RunEnded(status="ok")], "", oom_kills=1).status == "ok"


def test_task_that_slurm_killed_for_its_memory():
    log = "[rank3]: step 1\nsrun: error: n2: task 3: Out Of Memory\n"
    assert finished_run_verdict(1, [lost_connection(0)], log) == (
        "oom",
        "rank 3: srun: error: n2: task 3: Out Of Memory",
        3,
    )


def test_external_interruption():
    assert finished_run_verdict(143, [INTERRUPTED], "step 1\n") == ("incomplete", "interrupted by SIGTERM", None)


def test_same_error_on_every_rank_is_reported_once():
    ends = [RunEnded(rank=rank, time=9.0 - rank, status="failed", reason="tp=3 does not fit") for rank in (0, 1)]
    assert finished_run_verdict(1, ends, "") == ("failed", "tp=3 does not fit", None)


@pytest.mark.parametrize("ends", [(0, 1), (1,)])
def test_rank_that_others_name_is_blamed_even_if_it_wrote_no_end(ends):
    full = "cannot write checkpoint step_3: No space left on device"
    events = [RunEnded(rank=rank, time=9.0 - rank, status="failed", reason=full, failed_rank=0) for rank in ends]
    assert finished_run_verdict(2, events, "") == ("failed", f"rank 0: {full}", 0)


def test_full_disk_of_several_ranks_blames_none():
    events = [RunEnded(rank=rank, time=9.0, status="failed", reason="disk full", failed_rank=rank) for rank in (0, 1)]
    assert finished_run_verdict(2, events, "") == ("failed", "disk full", None)


def test_refusal_that_another_rank_finds_first():
    refusal = RunEnded(rank=7, time=1.0, status="failed", reason="lr_decay_steps=10: must be more")
    expected = ("failed", "lr_decay_steps=10: must be more", None)
    assert finished_run_verdict(1, [refusal, INTERRUPTED], TORCHRUN.format(code=1)) == expected
    assert finished_run_verdict(1, [lost_connection(0, 0.5), refusal], "") == expected


def lost_connection(rank, time=1.0):
    reason = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:46286"
    return RunEnded(rank=rank, time=time, status="failed", reason=reason, failed_rank=rank)


def test_rank_that_lost_the_connection_is_not_the_cause():
    killed = TORCHRUN.format(code=-9)
    assert finished_run_verdict(1, [lost_connection(0), lost_connection(2)], killed) == (
        "failed",
        "rank 1: killed by signal 9 (SIGKILL)",
        1,
    )
    raised = RunEnded(rank=1, time=2.0, status="failed", reason="ValueError: bad", failed_rank=1)
    assert finished_run_verdict(1, [lost_connection(0), raised, lost_connection(2)], "") == (
        "failed",
        "rank 1: ValueError: bad",
        1,
    )
    assert finished_run_verdict(1, [lost_connection(0), lost_connection(2)], "", silent=[1]).failed_rank == 1
    assert finished_run_verdict(1, [lost_connection(0, 2.0), lost_connection(2, 1.0)], "").failed_rank is None


def test_exit_codes_of_all_ranks_listed_by_torchrun():
    log = (
        TORCHRUN.format(code=2)
        + """\
[1]:
  time      : 2026-11-15_06:28:52
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 5113)
"""
    )
    assert exit_codes(log) == {1: 2, 2: -9}
    assert finished_run_verdict(1, [lost_connection(0), lost_connection(1)], log) == (
        "failed",
        "rank 2: killed by signal 9 (SIGKILL)",
        2,
    )


def test_diverged_rank_is_reported_by_all():
    ends = [RunEnded(rank=r, time=1.0, status="diverged", reason="nan, on rank 2", failed_rank=2) for r in (0, 1, 3)]
    assert finished_run_verdict(1, ends, "") == ("diverged", "nan, on rank 2", 2)


def test_last_lines_are_of_the_failed_rank():
    log = "[rank0]: step 1\n[rank2]: NCCL WARN\n" + TORCHRUN.format(code=-9) + "[rank2]: CUDA error\n[rank12]: x\n"
    assert last_lines(2, log) == ["NCCL WARN", "CUDA error"]
    assert last_lines(1, log) == []
    assert last_lines(0, "step 1\nstep 2\n") == ["step 1", "step 2"]
    assert len(last_lines(0, "step\n" * 100)) == 20


def test_last_lines_keep_the_innermost_frames():
    stack = ["Stack (most recent call first):", *(f'  File "x.py", line {n} in f{n}' for n in range(40))]
    lines = last_lines(1, "\n".join(f"[rank1]: {line}" for line in ["loading", *stack, "interrupted"]))
    assert lines == ["loading", *stack[:12]]


def test_long_reason_is_truncated():
    assert len(finished_run_verdict(1, [], "x" * 10_000).reason) == 500


@pytest.fixture
def torchrun(config, run_folder, engine):
    """Run two ranks of a fake engine under the real torchrun."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")

    def run(source: str, grace_s: float, on_event=lambda event: None) -> RunOutcome:
        _, script = engine(source)
        two = replace(config, machine=Machine(gpu="cpu", gpus=2, gpus_per_node=2))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
        return run_local(two, run_folder, command, {}, on_event, 60, grace_s)

    return run


@pytest.mark.slow
def test_rank_that_crashes_under_torchrun(torchrun):
    outcome = torchrun(
        """
        rank = int(os.environ["RANK"])
        exit_on_sigterm() if rank == 0 else None
        record_pid()
        while len(Path("pids").read_text().split()) < 2: time.sleep(0.01)
        if rank == 1:
            raise ValueError("no such layer")
        time.sleep(60)
        """,
        grace_s=5,
    )
    assert (outcome.status, outcome.reason) == ("failed", "rank 1: exit code 1: ValueError: no such layer")


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_do_not_survive_torchrun(torchrun, run_folder):
    outcome = torchrun(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        record_pid()
        while len(Path("pids").read_text().split()) < 2: time.sleep(0.01)
        if os.environ["RANK"] == "0":
            write(StepDone(step=1))
        while True: time.sleep(60)
        """,
        grace_s=0.3,
        on_event=lambda event: signal.raise_signal(signal.SIGINT) if isinstance(event, StepDone) else None,
    )
    assert (outcome.status, outcome.reason) == ("incomplete", "interrupted by SIGINT")
    assert [find_process(int(pid)) for pid in (run_folder.path / "pids").read_text().split()] == [None, None]


@pytest.mark.slow
def test_refusal_of_rank_1_reaches_the_user(torchrun, run_folder):
    outcome = torchrun(
        """
        from llmb.errors import ConfigError
        from llmb.runtime.engine_process import EngineProcess
        def run(config, recorder):
            Path(f"ready{recorder.rank}").touch()
            while not Path("ready0").exists(): time.sleep(0.01)
            if recorder.rank == 1:
                raise ConfigError("lr_decay_steps=10: must be more than lr_warmup_steps=10")
            time.sleep(60)
        sys.exit(EngineProcess("llmb.train", lambda: run).main(["config.json"]))
        """,
        grace_s=5,
    )
    line = "lr_decay_steps=10: must be more than lr_warmup_steps=10"
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", line, 1)
    assert f"[rank1]: llmb.train: {line}\n" in run_folder.log.read_text()
