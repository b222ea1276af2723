"""Table of `submit --dry-run`: the runs, what is predicted of them, and departures from the recipe.

    dry_table([(config, repeats), ...])

One run has its prediction in two sentences. Several are numbered, so that their long names and their predictions may
continue in further tables on a narrow terminal.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from llmb.config.native.departures import departure_lines, is_departure
from llmb.config.spec import Inference, RunConfig
from llmb.perfmodel.metrics import tokens_per_s
from llmb.report.config_summary import one_rank_text
from llmb.report.predictions.predicted_lines import predicted_lines
from llmb.report.setting_text import override_text
from llmb.report.table import number, render, terminal_width

HEADER = ("workload", "size", "dtype", "scale", "gpu", "proxy", "profile", "repeats")
PREDICTED_HEADER = ("step s", "output tokens/s", "80 % interval", "tokens/s", "GiB")


def dry_table(runs: Sequence[tuple[RunConfig, int]]) -> str:
    """Return the table, with predictions and departures below."""
    configs = [config for config, _ in runs]
    blocks = [_one_run(*runs[0])] if len(runs) == 1 else [_several_runs(runs), "\n".join(_sources(configs))]
    blocks.append("\n".join(_notes(configs)))
    return "\n\n".join(["dry run, nothing was started", *filter(None, blocks)])


def _cells(config: RunConfig, repeats: int) -> tuple[Any, ...]:
    machine = config.machine
    return (
        config.target, config.size, config.precision.dtype, machine.gpus, machine.gpu, bool(config.proxy),
        True if config.profile.profile else None, repeats,
    )  # fmt: skip


def _one_run(config: RunConfig, repeats: int) -> str:
    cells = _cells(config, repeats)
    table = render(*_filled((*HEADER, "name"), [(*cells, config.name)]), None)
    width = terminal_width()
    if width is not None and max(map(len, table.splitlines())) > width:
        table = f"{config.name}\n\n{render(*_filled(HEADER, [cells]))}"
    return "\n\n".join([table, *filter(None, ["\n".join(predicted_lines(config))])])


def _several_runs(runs: Sequence[tuple[RunConfig, int]]) -> str:
    """Return the table of numbered runs."""
    rows = [
        (place, *_cells(config, repeats), *_predicted_cells(config), config.name)
        for place, (config, repeats) in enumerate(runs, 1)
    ]
    header = ("#", *HEADER, *(f"predicted {title}" for title in PREDICTED_HEADER), "name")
    return render(*_filled(header, rows))


def _filled(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return a table without the columns that hold nothing."""
    columns = [column for column in range(len(header)) if any(row[column] is not None for row in rows)]
    return [header[column] for column in columns], [[row[column] for column in columns] for row in rows]


def _predicted_cells(config: RunConfig) -> tuple[Any, ...]:
    p, work = config.predicted, config.workload
    if p is None:
        return (None,) * len(PREDICTED_HEADER)
    interval = f"{number(p.interval_80[0])} to {number(p.interval_80[1])}" if p.interval_80 is not None else None
    rate = None
    if p.value is not None and not isinstance(work, Inference) and work.gbs is not None:
        rate = f"{tokens_per_s(work.seqlen, work.gbs, p.value):,.0f}"
    value = None if p.value is None else float(p.value)
    is_step = p.metric == "step_time_s"
    return value if is_step else None, None if is_step else value, interval, rate, p.memory_gib


def _sources(configs: Sequence[RunConfig]) -> list[str]:
    """Return where the predictions come from, or why there are none; each with the numbers of its runs."""
    predictions = [(place, config.predicted) for place, config in enumerate(configs, 1)]
    places = _places_of_lines(
        (place, f"by {p.source}" if p.value is not None else f"unknown ({p.note})")
        for place, p in predictions
        if p is not None
    )
    if len(places) == 1:
        return [f"predicted {line}" for line in places]
    return [f"predicted of {', '.join(map(str, numbers))}: {line}" for line, numbers in places.items()]


def _places_of_lines(lines: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return each line once, with the numbers of the runs that it holds for."""
    places: dict[str, list[int]] = {}
    for place, line in lines:
        places.setdefault(line, []).append(place)
    return places


def _notes(configs: Sequence[RunConfig]) -> list[str]:
    """Return what differs from the recipe: by name for one run, by number for several, whose names may be equal."""
    changes = _places_of_lines(
        (place, f"{override_text(override)} ({override.source})")
        for place, config in enumerate(configs, 1)
        for override in config.overrides
        if override.value != override.replaced and not is_departure(override)
    )
    several = len(configs) > 1
    notes = [
        f"{', '.join(map(str, numbers)) if several else configs[0].name}: {line}" for line, numbers in changes.items()
    ]
    notes += [f"{config.name}: {one_rank_text(config)}" for config in configs if config.one_rank is not None]
    return notes + [f"departs from the recipe: {line}" for line in departure_lines(configs)]
