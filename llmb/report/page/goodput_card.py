"""Goodput of a run that restarted after failures, on its page: each fault with its cost, and the wall time by part."""

from llmb.report.goodput_text import checkpoint_lines, headline
from llmb.report.page.html_blocks import paragraphs, section, table
from llmb.results.result import Result

HEADER = ("fault", "step", "rank", "after, s", "detect, s", "restart, s", "steps lost", "lost, s", "detected as")


def goodput_section(result: Result) -> str:
    """Return the section; empty where the run does not restart."""
    goodput = result.goodput
    if goodput is None:
        return ""
    faults = [
        (f.kind, f.step, f.rank, f.at_s, f.detect_s, f.restart_s, f.steps_lost, f.lost_s, f.reason)
        for f in goodput.faults
    ]
    advice = [] if goodput.checkpoints is None else checkpoint_lines(goodput.checkpoints, goodput.fraction)
    parts = table("wall-time", ("wall time", "s"), list(goodput.seconds.items()))
    content = f"{table('faults', HEADER, faults)}{parts}{paragraphs(advice)}"
    return section("goodput", "Goodput under faults", content, headline(goodput))
