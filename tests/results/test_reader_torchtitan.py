"""torchtitan logs: rates instead of seconds, in colours, with thousands separators."""

from pathlib import Path

from llmb.events import RunEnded, StepDone
from llmb.results.readers.reader_choice import read_log
from llmb.results.readers.torchtitan_log import read

LOGS = Path(__file__).parent.parent / "golden" / "logs"
LINE = (
    "[titan] 2025-08-02 10:00:07,123 - root - INFO - step: 10  loss: 7.1053  grad_norm: 1.2500  "
    "memory: 33.70GiB(42.61%)  tps: 7,450  tflops: 380.10  mfu: 38.44%"
)


def test_a_line_alone_gives_a_rate_and_no_seconds():
    step, end = read([LINE])
    assert step == StepDone(
        step=10,
        loss=7.1053,
        grad_norm=1.25,
        memory_bytes=round(33.70 * 2**30),
        reported_tflops_per_gpu=380.10,
        reported_tokens_per_s_per_gpu=7450,
    )
    assert end.status == "incomplete"
    assert "step 10" in end.reason


def test_seconds_follow_where_the_log_tells_tokens_and_gpus():
    events = list(read_log(LOGS / "torchtitan.log"))
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [step.step for step in steps] == [1, 10, 20, 30, 40, 50, 60]
    assert all(step.tokens == 8 * 8192 and step.steps == 60 for step in steps)
    for step in steps:
        assert step.seconds == step.tokens / 8 / step.reported_tokens_per_s_per_gpu
    assert events[-1] == RunEnded(status="ok")


def test_the_word_completed_ends_a_run_whose_length_is_not_printed():
    assert list(read([LINE, "[titan] - root - INFO - Training completed"]))[-1] == RunEnded(status="ok")


def test_older_lines_without_grad_norm_or_tflops():
    (step, _) = read(["[rank3]:2024-11-01 - root - INFO - step: 1  loss: 12.2  memory: 9.00GiB(10%)  tps: 900"])
    assert (step.rank, step.grad_norm, step.reported_tflops_per_gpu) == (3, None, None)
