"""Text of a run of one rank: what was measured, and what is modelled.

one_rank_line(step) -> "one rank of 512: measured compute 10.1 s + modelled communication 1.9 s + bubble 0.3 s = 12.3 s"
"""

from collections.abc import Iterator

from llmb.report.table import number
from llmb.results.result import OneRankStep


def one_rank_line(step: OneRankStep) -> str:
    """Return the measured and the modelled parts of a step, and their sum."""
    measured = f"one rank of {step.ranks}: measured compute {number(step.measured_s)} s"
    bubble = f"bubble {number(step.bubble_s)} s"
    if step.communication_s is None or step.step_time_s is None:
        return f"{measured} + modelled {bubble}; communication is not known for this machine"
    communication = f"modelled communication {number(sum(step.communication_s.values()))} s"
    return f"{measured} + {communication} + {bubble} = {number(step.step_time_s)} s"


def one_rank_rows(step: OneRankStep, gpu: str | None) -> Iterator[tuple[str, str, str, str]]:
    """Yield figure, value, unit and explanation of each part."""
    ran = f"rank {step.rank} of {step.ranks} ({step.layout}), alone on {step.machine}"
    yield "rank compute", number(step.tflops), "TFLOP/s", f"what {ran} computes, recomputation included"
    peers = f"{step.ranks} x {gpu}"
    for kind, seconds in (step.communication_s or {}).items():
        yield (
            f"modelled {kind}",
            number(seconds),
            "s",
            f"of a step on {peers}: communication that compute does not hide",
        )
    yield "modelled bubble", number(step.bubble_s), "s", "of a step: waiting for other pipeline stages"
    if step.step_time_s is not None:
        yield "modelled step", number(step.step_time_s), "s", f"of {peers}: measured compute and what is modelled"
    if step.reference is not None:
        published = f"published {number(step.reference.value)} s of all ranks ({step.reference.source})"
        explanation = f"the {published} over the modelled step, not a measured one; above 1 is faster"
        yield "beside reference", f"{step.reference.ratio:.3f}", "x", explanation
