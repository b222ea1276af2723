"""Index of all runs: one table that sorts and filters, with a link to the page of each run."""

from collections.abc import Sequence
from datetime import datetime
from html import escape

from llmb.report.page.html_blocks import copy_button, link
from llmb.report.page.page_shell import page
from llmb.report.table import number
from llmb.results.job_store import Job
from llmb.results.run_settings import FAULTS_WORD, ONE_RANK_WORD

FIGURES = (
    ("s/step", "step_time_s"), ("tokens/s/GPU", "tokens_per_s_per_gpu"), ("TFLOP/s/GPU", "tflops_per_gpu"),
    ("MFU", "mfu"), ("output tokens/s", "output_tokens_per_s"), ("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"),
    ("against reference", "reference_ratio"),
)  # fmt: skip
FILTERED = ("workload", "size", "dtype", "GPU", "status")  # columns with a choice of their own
WORDS = ("job", "workload", "size", "dtype", "GPU", "started", "status")  # columns of text, before scale and figures
NOTE = (
    "A click on a title sorts. Runs with a report are links. * is a proxy; + is one rank of a layout, alone; "
    "! has faults injected on purpose."
)


def jobs_index(rows: Sequence[tuple[Job, str | None]]) -> str:
    """Return the page; each job has the path of its page, relative to this one, or None."""
    jobs = [job for job, _ in rows]
    figures = [(title, field) for title, field in FIGURES if any(getattr(job, field) is not None for job in jobs)]
    heads = "".join(
        [
            *(_head(title, "word") for title in WORDS),
            *(_head(title) for title in ("scale", *(title for title, _ in figures))),
            _head("settings", "word"),
        ]
    )
    body = "".join(_row(job, path, [field for _, field in figures]) for job, path in rows)
    blocks = [
        "<h1>Runs</h1>",
        f'<div class="filters"><input data-filters="" type="search" placeholder="any text" aria-label="any text">'
        f"{''.join(_choice(title, jobs) for title in FILTERED)}"
        f'<span id="shown" class="place">{len(rows)} of {len(rows)} runs</span></div>',
        f'<div class="table"><table id="runs" class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{copy_button('runs')}",
        f'<p class="place">{escape(NOTE)}</p>',
    ]
    return page("Runs", blocks)


def _head(title: str, css: str = "") -> str:
    return f'<th scope="col" aria-sort="none" class="{css}">{escape(title)}</th>'


def _row(job: Job, path: str | None, figures: Sequence[str]) -> str:
    """Return the cells of a job, in the order of the heads."""
    name = link(job.job_id, path) if path else escape(job.job_id)
    started = datetime.fromtimestamp(job.created_at)
    words = [_marked_workload(job), job.size, job.dtype, job.gpu]
    cells = [f'<td class="word">{name}</td>', *(_word(word) for word in words)]
    cells += [f'<td class="word" data-value="{job.created_at:.0f}">{started:%Y-%m-%d %H:%M}</td>']
    reason = f' title="{escape(job.reason)}"' if job.reason else ""
    cells += [f'<td class="word"{reason}>{escape(job.status)}</td>', _number(job.scale)]
    cells += [*(_number(getattr(job, field)) for field in figures), _word(job.settings)]
    return f"<tr>{''.join(cells)}</tr>"


def _word(text: str | None) -> str:
    return f'<td class="word">{escape(text or "")}</td>'


def _marked_workload(job: Job) -> str:
    words = (job.settings or "").split()
    has_faults = any(word.startswith(FAULTS_WORD) for word in words)
    is_one_rank = any(word.startswith(ONE_RANK_WORD) for word in words)
    return job.workload + "*" * bool(job.proxy) + "+" * is_one_rank + "!" * has_faults


def _number(value: float | None) -> str:
    return '<td data-value=""></td>' if value is None else f'<td data-value="{value!r}">{escape(number(value))}</td>'


def _choice(title: str, jobs: Sequence[Job]) -> str:
    """Return a choice of the values in a column."""
    fields = {"GPU": "gpu"}
    values = {getattr(job, fields.get(title, title)) or "" for job in jobs}
    if title == "workload":
        values = set(map(_marked_workload, jobs))
    options = "".join(f"<option>{escape(value)}</option>" for value in sorted(values) if value)
    column = WORDS.index(title)
    return f'<select data-filters="{column}" aria-label="{title}"><option value="">{title}</option>{options}</select>'
