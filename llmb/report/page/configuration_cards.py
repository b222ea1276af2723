"""Lower half of a run's page: warnings, configuration with what differs from the recipe first, command, versions,
files, every figure of the result, and the raw samples."""

import gzip
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from llmb.config.load_settings import LoadConfig
from llmb.config.serialization import to_plain
from llmb.events import RequestDone, StepDone
from llmb.report.page.html_blocks import copy_button, link, section, table
from llmb.report.page.page_shell import compressed
from llmb.report.page.run_record import RunRecord
from llmb.report.setting_text import override_rows, settings
from llmb.report.summary import NOTES
from llmb.results.result import Result

MOST_ROWS = 20_000  # of raw samples that a page carries
STEP_COLUMNS = ("rank", "step", "seconds", "busy_s", "tokens", "loss", "grad_norm", "memory_bytes", "warmup")
REQUEST_COLUMNS = (
    "rank", "request", "scheduled", "arrival", "first_token", "end", "input_tokens", "output_tokens", "finish",
    "warmup", "error",
)  # fmt: skip
LEFT_OUT = (
    "last_lines",
    "warnings",
    "overrides",
    "versions",
    "device",
    "number_formats",
)  # shown in blocks of their own


def warning_blocks(result: Result) -> str:
    """Return the warnings of a result, and the last lines of a rank that failed."""
    blocks = [
        f'<div class="warning"><b>{_kind(w.code)} {escape(w.code)}</b>: {escape(w.text)}</div>' for w in result.warnings
    ]
    if result.status != "ok":
        reason = f": {result.reason}" if result.reason else ""
        blocks.insert(0, f'<div class="warning failure"><b>{escape(result.status)}</b>{escape(reason)}</div>')
    if result.last_lines:
        lines = escape("\n".join(result.last_lines))
        blocks.append(f"<p>Last lines of rank {result.failed_rank}:</p><pre>{lines}</pre>")
    return section("warnings", "Warnings", "".join(blocks))


def _kind(code: str) -> str:
    return "note" if code in NOTES else "warning"


def configuration(record: RunRecord) -> str:
    """Return the settings: differences from the recipe first."""
    config = record.config
    changed = table(
        "changed", ("changed", "recipe", "here", "by"),
        override_rows(o for o in config.overrides if o.value != o.replaced),
    )  # fmt: skip
    pairs = to_plain(config.workload).items() if isinstance(config, LoadConfig) else settings(config)
    every = table("settings", ("setting", "value"), [(name, _text(value)) for name, value in pairs], "words pairs")
    environment = table("environment", ("variable", "value"), sorted(config.environment.items()))
    if not changed and not isinstance(config, LoadConfig):  # which has no recipe
        origin = "the recipe's proxy" if config.proxy else "the recipe"
        changed = f"<p>Nothing differs from {origin}.</p>"
    content = f"{changed}<details><summary>All settings</summary>{every}{environment}</details>"
    return section("configuration", "Configuration", content, css="long")


def provenance(record: RunRecord) -> str:
    """Return the command, versions, and files beside the page."""
    result = record.result
    command = (
        f'<pre id="command">{escape(record.command)}</pre>{copy_button("command", "Copy")}'
        if record.command
        else "<p>The command line was not recorded.</p>"
    )
    facts = {
        "host": result.host, "hardware": result.gpu_name, "commit": result.commit, "engine": result.engine,
        **result.versions, **{name: _text(value) for name, value in result.device.items()},
        **{name: _text(value) for name, value in result.number_formats.items()},
    }  # fmt: skip
    versions = table("versions", ("what", "value"), [(k, v) for k, v in facts.items() if v is not None])
    files = "".join(f"<li>{link(label, path)}</li>" for label, path in record.files)
    return section("command-and-versions", "Command, versions, files", f"{command}{versions}<ul>{files}</ul>")


def figures_table(result: Result) -> str:
    """Return every figure of the result, one a line, under its name in result.json."""
    plain = {name: value for name, value in to_plain(result).items() if name not in LEFT_OUT}
    rows = list(flatten(plain))
    every = table("figures", ("figure", "value"), rows, "words pairs")
    content = f"<details><summary>{len(rows)} figures</summary>{every}</details>"
    return section("raw-figures", "Every figure", content, "As in result.json; the unit is in the name.", "long")


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values inside nested data with dotted names; long lists of samples and what is null are left out."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            if name != "samples":
                yield from flatten({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def samples(record: RunRecord) -> str:
    """Return the raw steps and requests, compressed, with a button that copies them."""
    blocks = []
    groups: tuple[tuple[str, type, tuple[str, ...]], ...] = (
        ("steps", StepDone, STEP_COLUMNS), ("requests", RequestDone, REQUEST_COLUMNS),
    )  # fmt: skip
    for noun, kind, columns in groups:
        events: list[Any] = record.of_type(kind)
        if not events:
            continue
        if len(events) > MOST_ROWS:
            blocks.append(f"<p>{len(events):,} {noun}: too many for a page; they are in the event files above.</p>")
            continue
        lines = ["\t".join(columns), *("\t".join(_text(getattr(e, c)) for c in columns) for e in events)]
        data = b64encode(gzip.compress("\n".join(lines).encode("utf-8", "replace"), mtime=0)).decode()
        name = f"samples-{noun}"
        button = copy_button(name, f"Copy all {len(events):,} {noun} as TSV")
        blocks.append(f"<p>{button}</p>{compressed(name, data)}")
    return section("samples", "Raw samples", "".join(blocks))


def _text(value: Any) -> str:
    if value is None:
        return ""
    text = str(value) if not isinstance(value, list | tuple | dict) else ", ".join(map(str, value))
    return " ".join(text.split())
