"""End of the output of `llmb-run submit`: a summary, where it is stored, and what else there is.

    print(closing_text(result, "run folder: ...", ["all figures: ..."], other_lines=4))

The output of a serving run fits its terminal: of the figures the most telling ones are shown, one line each. The page,
the log and `llmb-run jobs show` have all. In a pipe, of a failed run, or in a high terminal nothing is left out.
"""

import shutil
import sys
from collections.abc import Sequence

from llmb.report.setting_text import precision_text
from llmb.report.summary import (
    DISTRIBUTION_HEADER,
    FIGURE_HEADER,
    distribution_rows,
    figure_rows,
    summary,
    warning_lines,
)
from llmb.report.table import render
from llmb.results.result import Result

# Most telling first; figures that are not listed come last.
RANKING = (
    "output, whole run", "against reference", "against prediction", "output, steady", "tokens/s/user",
    "requests", "output per GPU", "power", "concurrency", "input and output", "KV cache", "peak memory",
)  # fmt: skip
DISTRIBUTIONS = 4  # TTFT, TPOT, ITL, end to end
LEAST_FIGURES, LEAST_WARNINGS = 3, 1


def closing_text(result: Result, run_folder: str, below: Sequence[str], other_lines: int) -> str:
    """Return the summary and the lines below it.

    `other_lines`: how many are printed before and after, those that name job and run folder among them.
    """
    text = "\n".join(["", summary(result), "", run_folder, *below])
    if not sys.stdout.isatty() or not result.requests or result.status != "ok":
        return text
    columns, height = shutil.get_terminal_size()
    free = height - 1 - other_lines  # the prompt
    if _height(text, columns) <= free:
        return text
    return "\n".join(["", *_short_summary(result, columns, free - 1 - len(below)), *below])


def _short_summary(result: Result, columns: int, height: int) -> list[str]:
    precision = f", precision: {precision_text(result.number_formats)}" if result.number_formats else ""
    distributions = render(DISTRIBUTION_HEADER, list(distribution_rows(result))[:DISTRIBUTIONS], None).splitlines()
    rows, warnings = list(figure_rows(result)), warning_lines(result)
    free = height - len(distributions) - 5  # the status, two blank lines, the header of figures
    figure_count = max(LEAST_FIGURES, free - max(LEAST_WARNINGS, len(warnings))) if warnings else free
    ranked = sorted(rows, key=lambda row: RANKING.index(row[0]) if row[0] in RANKING else len(RANKING))
    chosen = [row for row in rows if row in ranked[:figure_count]]
    warning_count = max(LEAST_WARNINGS, free - len(chosen))
    if len(warnings) > warning_count:
        warnings = [
            *warnings[: warning_count - 1],
            f"{len(warnings) - warning_count + 1} notes and warnings are on the page",
        ]
    figures = render(FIGURE_HEADER, chosen, None).splitlines()
    lines = [f"{result.status}{precision}", "", *figures, "", *distributions, *warnings]
    return [line if len(line) <= columns else line[: columns - 1].rstrip() + "…" for line in lines]


def _height(text: str, columns: int) -> int:
    return sum(max(1, -(-len(line) // columns)) for line in text.splitlines())
