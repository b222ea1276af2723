"""Index of all runs: one table that sorts and filters, with a link to the page of each run."""

from collections.abc import Sequence
from datetime import datetime
from html import escape

from llmb.report.page.html_blocks import copy_button, link
from llmb.report.page.page_shell import page
from llmb.report.table import number
from llmb.results.job_store import Job
from llmb.results.run_settings import FAULTS_WORD

FIGURES = (
    ("s/step", "step_time_s"), ("tokens/s/GPU", "tokens_per_s_per_gpu"), ("TFLOP/s/GPU", "tflops_per_gpu"),
    ("MFU", "mfu"), ("output tokens/s", "output_tokens_per_s"), ("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"),
    ("against reference", "reference_ratio"),
)  # fmt: skip
FILTERED = ("workload", "size", "dtype", "GPU", "status")  # columns with a choice of their own
COLUMNS = ("job", "workload", "size", "dtype", "scale", "GPU", "started", "status", *(title for title, _ in FIGURES))


def jobs_index(rows: Sequence[tuple[Job, str | None]]) -> str:
    """Return the page; each job has the path of its page, relative to this one, or None."""
    heads = "".join(f'<th scope="col" aria-sort="none">{escape(title)}</th>' for title in COLUMNS)
    body = "".join(_row(job, path) for job, path in rows)
    blocks = [
        "<h1>Runs</h1>",
        f'<div class="filters"><input data-filters="" type="search" placeholder="any text" aria-label="any text">'
        f"{''.join(_choice(title, [job for job, _ in rows]) for title in FILTERED)}"
        f'<span id="shown" class="place">{len(rows)} of {len(rows)} runs</span></div>',
        f'<div class="table"><table id="runs" class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{copy_button('runs')}",
        '<p class="place">A click on a title sorts. Runs with a report are links; * is a proxy, ! has faults.</p>',
    ]
    return page("Runs", blocks)


def _row(job: Job, path: str | None) -> str:
    name = link(job.job_id, path) if path else escape(job.job_id)
    started = datetime.fromtimestamp(job.created_at)
    words = [_marked_workload(job), job.size, job.dtype]
    cells = [f"<td>{name}</td>", *(f"<td>{escape(word or '')}</td>" for word in words), _number(job.scale)]
    cells += [f"<td>{escape(job.gpu or '')}</td>"]
    cells += [f'<td data-value="{job.created_at:.0f}">{started:%Y-%m-%d %H:%M}</td>']
    reason = f' title="{escape(job.reason)}"' if job.reason else ""
    cells += [f"<td{reason}>{escape(job.status)}</td>", *(_number(getattr(job, field)) for _, field in FIGURES)]
    return f"<tr>{''.join(cells)}</tr>"


def _marked_workload(job: Job) -> str:
    has_faults = any(word.startswith(FAULTS_WORD) for word in (job.settings or "").split())
    return job.workload + "*" * bool(job.proxy) + "!" * has_faults


def _number(value: float | None) -> str:
    return '<td data-value=""></td>' if value is None else f'<td data-value="{value!r}">{escape(number(value))}</td>'


def _choice(title: str, jobs: Sequence[Job]) -> str:
    """Return a choice of the values in a column."""
    fields = {"GPU": "gpu"}
    values = {getattr(job, fields.get(title, title)) or "" for job in jobs}
    if title == "workload":
        values = set(map(_marked_workload, jobs))
    options = "".join(f"<option>{escape(value)}</option>" for value in sorted(values) if value)
    column = COLUMNS.index(title)
    return f'<select data-filters="{column}" aria-label="{title}"><option value="">{title}</option>{options}</select>'
