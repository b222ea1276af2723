"""End of a run, derived from evidence, for every format; recognition of formats; logs cut anywhere."""

from pathlib import Path

import pytest

from llmb.errors import ConfigError, UnknownName
from llmb.events import CollectiveSeen, LogProblem, RunEnded, StepDone
from llmb.results.readers.reader_choice import READERS, detect, read_log

LOGS = Path(__file__).parent.parent / "golden" / "logs"
FORMATS = {
    "megatron_bridge.out": "megatron_bridge",
    "megatron_bridge_nan.out": "megatron_bridge",
    "megatron_bridge_oom.out": "megatron_bridge",
    "megatron_bridge_ranks.out": "megatron_bridge",
    "nccl.log": "nccl",
    "nemo.out": "nemo",
    "nemo_progress_bar.out": "nemo",
    "torchtitan.log": "torchtitan",
    "trtllm.out": "trtllm",
    "trtllm_no_streaming.out": "trtllm",
    "vllm.log": "vllm",
}
STEP = "iteration {}/ 4 | elapsed time per iteration (ms): 1000.0 | lm loss: 1.0 | grad norm: {} |\n"


def steps_of(events):
    return [event for event in events if isinstance(event, StepDone)]


def ending(tmp_path, text: str, reader: str | None = "megatron_bridge"):
    path = tmp_path / "run.out"
    path.write_text(text)
    return list(read_log(path, reader))


def steps(first: int, last: int, norm: str = "1.0") -> str:
    return "".join(STEP.format(n, norm) for n in range(first, last + 1))


def test_every_golden_log_is_recognised_and_no_log_is_untested():
    assert {path.name: detect(path) for path in LOGS.iterdir()} == FORMATS
    assert set(FORMATS.values()) == set(READERS)


def test_a_sign_may_stand_anywhere_in_a_long_log(tmp_path):
    path = tmp_path / "long.log"
    path.write_bytes(b"chatter\n" * 400_000 + b"train_step_timing in s: 1\n" + b"chatter\n" * 400_000)
    assert detect(path) == "nemo"


def test_a_training_log_that_traces_its_collectives_gives_both(tmp_path):
    path = tmp_path / "both.log"
    path.write_bytes((LOGS / "nccl.log").read_bytes() + (LOGS / "megatron_bridge.out").read_bytes())
    assert detect(path) == "megatron_bridge"
    events = list(read_log(path))
    assert sum(event.calls for event in events if isinstance(event, CollectiveSeen)) == 44
    assert len(steps_of(events)) == 50
    assert events[-1] == RunEnded(status="ok")


def test_a_step_written_into_a_line_of_the_trace_is_read(tmp_path):
    (step, *_) = ending(tmp_path, "[7] NCCL INFO AllReduce: opCount 2 sendb" + STEP.format(1, 1.0))
    assert step.step == 1


def test_the_exception_may_follow_its_traceback_after_lines_of_other_ranks(tmp_path):
    others = "".join(f"[rank{n % 8 + 1}]: a line of another rank\n" for n in range(20_000))
    text = f"[rank0]: Traceback (most recent call last):\n{others}[rank0]:   File x\n{others}[rank0]: KeyError: 'w'\n"
    assert ending(tmp_path, steps(1, 2) + text)[-1] == RunEnded(status="failed", reason="KeyError: 'w'")


def test_a_wrong_reader_lists_the_right_ones():
    with pytest.raises(UnknownName, match=r"unknown reader 'nemmo' \(did you mean nemo\?\); choices are: nemo, "):
        read_log(LOGS / "nemo.out", "nemmo")


def test_a_missing_log_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.out: No such file"):
        read_log(tmp_path / "missing.out")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", [b"", b"\n", b"\x00" * 5000, bytes(range(256)) * 40, b"x" * 300_000])
def test_nothing_and_garbage_are_incomplete(tmp_path, reader, content):
    path = tmp_path / "run.out"
    path.write_bytes(content)
    (end,) = read_log(path, reader)
    assert end.status == "incomplete"
    assert end.reason.startswith("no ")
    assert detect(path) is None
    assert list(read_log(path)) == [RunEnded(status="incomplete", reason="no timing lines")]


def test_the_last_step_makes_it_ok(tmp_path):
    assert ending(tmp_path, steps(1, 4))[-1] == RunEnded(status="ok")


def test_a_cut_log_says_how_far_it_came(tmp_path):
    events = ending(tmp_path, steps(1, 2))
    assert len(steps_of(events)) == 2
    assert events[-1] == RunEnded(status="incomplete", reason="the log stops after step 2 of 4")


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf"])
def test_the_first_bad_step_is_named(tmp_path, value):
    end = ending(tmp_path, steps(1, 2) + steps(3, 4, value))[-1]
    assert end == RunEnded(status="diverged", reason=f"grad_norm={value.lower()} at step 3")


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried\n",
            "oom",
            "torch.OutOfMemoryError: CUDA out of memory. Tried",
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n", "oom", "Detected 1 oom_kill event"),
        ("slurmstepd: error: *** STEP 7.0 CANCELLED AT 2025-01-01 DUE TO TIME LIMIT ***\n", "timeout", "TIME LIMIT"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1\n", "failed", "NCCL error in: x.cpp:1"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n", "failed", "ChildFailedError"),
        (
            "[rank1]: Traceback (most recent call last):\n[rank0]: hello\n[rank1]:   File 'x', line 1\n"
            "[rank1]:     boom()\n[rank1]: ValueError: boom\n[rank1]: later\n",
            "failed",
            "ValueError: boom",
        ),
        ("Traceback (most recent call last):\n", "failed", "Traceback (most recent call last)"),
        (
            "Traceback (most recent call last):\n  File 'x', line 1\ntorch.OutOfMemoryError: CUDA out of memory.\n",
            "oom",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
    ],
)
@pytest.mark.parametrize("done", [0, 2])
def test_failures_have_a_name_and_a_line(tmp_path, text, status, reason, done):
    events = ending(tmp_path, steps(1, done) + text, None)
    assert len(steps_of(events)) == done
    assert events[-1].status == status
    assert reason in events[-1].reason


def test_errors_of_the_shutdown_do_not_spoil_a_finished_run(tmp_path):
    events = ending(tmp_path, steps(1, 4) + "torch.distributed.DistBackendError: NCCL error while closing\n")
    problem = "error text in a run that finished: torch.distributed.DistBackendError: NCCL error while closing"
    assert events[-2:] == [LogProblem(problem=problem), RunEnded(status="ok")]


def test_a_repeated_step_is_kept_once_for_each_rank_and_counted(tmp_path):
    text = "".join(f"{rank}: {STEP.format(n, 1)}" for n in range(1, 5) for rank in (0, 1, 1))
    events = ending(tmp_path, text)
    assert [(s.rank, s.step) for s in steps_of(events)] == [(rank, n) for n in range(1, 5) for rank in (0, 1)]
    assert LogProblem(problem="step seen again", count=4) in events


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron_bridge_oom.out", "nemo_progress_bar.out", "torchtitan.log", "vllm.log"])
def test_a_log_cut_at_any_byte_keeps_what_was_complete(tmp_path, name):
    whole = (LOGS / name).read_bytes()
    path = tmp_path / "cut.out"
    full = steps_of(read_log(LOGS / name))
    counted = 0
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        events = list(read_log(path, FORMATS[name]))
        assert isinstance(events[-1], RunEnded)
        saved = steps_of(events)
        assert [step.step for step in saved] == [step.step for step in full[: len(saved)]]
        assert all(step.seconds == second.seconds for step, second in zip(saved, full, strict=False))
        assert len(saved) >= counted  # a longer log never holds fewer steps
        counted = len(saved)
        detect(path)
    assert counted == len(full)
