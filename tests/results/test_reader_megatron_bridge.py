"""Megatron-Bridge logs: TFLOP/s lines go to the next step of their rank, memory lines to the step before."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmb.events import LogProblem, RunEnded, StepDone
from llmb.results.readers.megatron_bridge_log import read
from llmb.results.readers.reader_choice import read_log

LOGS = Path(__file__).parent.parent / "golden" / "logs"


def tflops_line(value: float) -> str:
    return f"Step Time : 5.74s GPU utilization: {value:.1f}MODEL_TFLOP/s/GPU"


def step_line(step: int, steps: int, milliseconds: float = 1000.0, extra: str = "", norm: str = "1.5") -> str:
    return (
        f" [2025-12-19 10:49:15] iteration {step:8d}/{steps:8d} | consumed samples: {step * 8:12d} | "
        f"elapsed time per iteration (ms): {milliseconds:.1f} |{extra} lm loss: 1.258695E+01 | grad norm: {norm} |"
    )


def steps_of(events):
    return [event for event in events if isinstance(event, StepDone)]


def test_the_published_lines_give_every_field():
    events = list(
        read(
            [
                tflops_line(463.1),
                step_line(1, 1, 20289.1, norm="10.275") + "Number of parameters in transformer layers: 6.98",
                "Theoretical memory footprints: weight and optimizer=57438.81 MB",
                "[Rank 0] (after 1 iterations) memory (GB) | mem-allocated-gigabytes: 51.072 | "
                "mem-max-allocated-gigabytes: 194.41 | mem-max-reserved-gigabytes: 216.89 |",
            ]
        )
    )
    assert events == [
        StepDone(
            step=1,
            steps=1,
            seconds=20289.1 / 1000,
            loss=12.58695,
            grad_norm=10.275,
            memory_bytes=194_410_000_000,
            reported_tflops_per_gpu=463.1,
        ),
        RunEnded(status="ok"),
    ]


def test_the_memory_line_of_megatron_lm_counts_in_mebibytes():
    memory = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | reserved: 4.0"
    step, _ = read([step_line(1, 1), memory])
    assert step.memory_bytes == 2 << 20


def test_one_tflops_line_too_few_or_too_many_shifts_nothing():
    steps = steps_of(
        read(
            [
                tflops_line(101),
                step_line(1, 4),
                step_line(2, 4),
                tflops_line(999),
                tflops_line(103),
                step_line(3, 4),
                step_line(4, 4, extra=" throughput per GPU (TFLOP/s/GPU): 104.0 |"),
            ]
        )
    )
    assert [step.reported_tflops_per_gpu for step in steps] == [101, None, 103, 104]


def test_a_tflops_line_glued_to_its_step_is_read():
    (step, _) = read([tflops_line(101) + step_line(1, 1)])
    assert step.reported_tflops_per_gpu == 101


def test_ranks_that_write_at_once_keep_their_own_figures():
    events = list(read_log(LOGS / "megatron_bridge_ranks.out"))
    by_rank = {rank: [s for s in steps_of(events) if s.rank == rank] for rank in (0, 3)}
    assert all([s.step for s in steps] == list(range(1, 9)) for steps in by_rank.values())
    assert [s.reported_tflops_per_gpu for s in by_rank[0]] == [701, 702, 703, 704, 705, 999.9, 717, 708]
    assert [s.reported_tflops_per_gpu for s in by_rank[3]] == [704, 705, 706, None, 708, 709, 717, 711]
    assert LogProblem(problem="step seen again") in events


def test_a_loss_that_is_not_a_number_is_named_with_its_first_step():
    events = list(read_log(LOGS / "megatron_bridge_nan.out"))
    assert len(steps_of(events)) == 12
    assert events[-1] == RunEnded(status="diverged", reason="grad_norm=nan at step 6")


def test_running_out_of_memory_keeps_the_steps_before():
    events = list(read_log(LOGS / "megatron_bridge_oom.out"))
    assert len(steps_of(events)) == 3
    assert events[-1].status == "oom"
    assert "Tried to allocate 7.83 GiB" in events[-1].reason


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 1e6), st.floats(1, 1e4)), min_size=1, max_size=60))
def test_any_number_of_steps_with_and_without_tflops(drawn):
    lines = []
    for number, (printed, milliseconds, tflops) in enumerate(drawn, 1):
        lines += [tflops_line(tflops)] if printed else []
        lines.append(step_line(number, len(drawn), milliseconds))
    *steps, end = read(lines)
    assert end == RunEnded(status="ok")
    for step, (printed, milliseconds, tflops) in zip(steps, drawn, strict=True):
        assert step.seconds == float(f"{milliseconds:.1f}") / 1000
        assert step.reported_tflops_per_gpu == (float(f"{tflops:.1f}") if printed else None)
