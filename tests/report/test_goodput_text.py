"""Goodput of a run that restarted, in one line."""

from dataclasses import replace

from llmb.report.goodput_text import headline
from llmb.results.goodput.goodput_result import Goodput

RUN = Goodput(
    injected=None, planned_faults=0, restarts=1, wall_s=200.0, useful_tokens=5000, tokens_per_s=25.0, fraction=0.5,
    seconds={},
)  # fmt: skip


def test_the_headline_counts_restarts_and_says_whether_faults_were_injected():
    rate = "goodput: 25 useful tokens/s over 200 s of wall time, 50.0 % of the throughput"
    assert headline(RUN) == f"{rate} (1 restart; failures were real)"
    injected = replace(RUN, restarts=3, injected="faults.yaml", fraction=None)
    assert headline(injected).endswith("of wall time (3 restarts; faults injected on purpose: faults.yaml)")
