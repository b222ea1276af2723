"""`llmb-run list` and `llmb-run show`: available workloads, and one run in full before it runs."""

import argparse
import json
import os
import sys
from typing import Any

from llmb.cli.model_run.model_options import add_model_options, recipes_for
from llmb.cli.run_options import add_run_options, complete_with, examples, load_recipes
from llmb.cli.subcommand import command

KEY_COLUMNS = ("size", "gpu", "dtype", "gpus", "mode", "use_case")  # that tell rows apart, as far as rows have them
LIST_WIDTH = 80  # of lists in a pipe or a file; programs read --json


def add_commands(commands: Any) -> None:
    """Register list, show and completion."""
    listing = command(
        commands, "list", run_list, "workloads, sizes, dtypes, scales",
        "llmb-run list", "llmb-run list -w pretrain_grok1",
    )  # fmt: skip
    complete_with(listing.add_argument("-w", "--workload", help="one workload in detail"), load_recipes)
    listing.add_argument("--json", action="store_true", help="as JSON")

    show = command(commands, "show", run_show, "one run in full: settings, FLOPs, memory, command", *examples("show"))
    add_run_options(show)
    add_model_options(show)
    memory_help = (
        "one rank at full size, without a GPU: memory, FLOPs and collectives of a step (training; needs torch)"
    )
    show.add_argument("--memory", action="store_true", help=memory_help)
    show.add_argument(
        "--json", action="store_true", help="as JSON: the resolved configuration, or the dry run of --memory"
    )

    source = 'eval "$(llmb-run completion bash)"'
    completion = command(commands, "completion", run_completion, "print the shell completion script", source)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")


def run_list(options: argparse.Namespace) -> int:
    """List all workloads, or one in detail."""
    from llmb.report.table import render, terminal_width

    recipes = load_recipes()
    if options.workload is not None:
        return _list_one(options, recipes)
    header = ("workload", "what", "sizes", "dtypes", "GPUs", "results")
    rows = [
        (
            r.workload,
            r.title,
            " ".join(r.sizes),
            " ".join(r.values("dtype")),
            " ".join(r.values("gpu")),
            len(r.references),
        )
        for r in recipes.values()
    ]
    if options.json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows]))
    else:
        width = terminal_width() or LIST_WIDTH
        print(render(header, rows, width) + "\n\nmore: llmb-run list -w WORKLOAD; any of them here, small: --proxy")
    return 0


def _list_one(options: argparse.Namespace, recipes: dict[str, Any]) -> int:
    """Print rows, proxies and published results of one workload."""
    from textwrap import fill

    from llmb.config.row_selection import SCALED_DOWN
    from llmb.config.run_list import split_target
    from llmb.report.table import terminal_width

    recipe, size = split_target(options.workload, recipes)
    rows = [row for row in recipe.rows if size in (None, row["size"])]
    if options.json:
        print(json.dumps({"workload": recipe.workload, "rows": rows, "proxies": recipe.proxies,
                          "references": recipe.references}))  # fmt: skip
        return 0
    width = terminal_width() or LIST_WIDTH
    print(f"{recipe.workload}: {recipe.title}\n")
    if rows:
        print(_recipe_table(rows, width) + "\n")
    sizes = ", ".join(recipe.values("size", True, size=size))
    scale = "; any --scale, with a layout above scaled down" if recipe.kind in SCALED_DOWN else ""
    proxies = f"proxies (--proxy): {sizes}{scale}; `llmb-run show ... --proxy` says what one leaves out"
    print(fill(proxies, width, break_long_words=False, break_on_hyphens=False))
    if recipe.references:
        references = [{k: v for k, v in r.items() if k not in ("note", "plan")} for r in recipe.references]
        print("\npublished results\n" + _recipe_table(references, width))
    return 0


def _recipe_table(rows: list[dict[str, Any]], width: int) -> str:
    """Return the table of recipe rows; where it would be too wide, columns with one value become a line above it."""
    from llmb.report.table import render

    present = dict.fromkeys(name for row in rows for name in row)
    keys = [name for name in KEY_COLUMNS if name in present]
    header = [*keys, *(name for name in present if name not in keys)]
    cells = [[_text(row.get(name)) for name in header] for row in rows]
    text = render(header, cells, None)
    if max(map(len, text.splitlines())) <= width or len(rows) == 1:
        return render(header, cells, width, keys=len(keys))
    common = [i for i, name in enumerate(header) if name not in keys and all(c[i] == cells[0][i] for c in cells)]
    varying = [i for i in range(len(header)) if i not in common]
    table = render([header[i] for i in varying], [[c[i] for i in varying] for c in cells], width, keys=len(keys))
    shared = render(("in all rows", "value"), [(header[i], cells[0][i]) for i in common], width)
    return f"{shared}\n\n{table}" if common else table


def _text(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def run_show(options: argparse.Namespace) -> int:
    """Print the resolved configuration of each selected run."""
    from llmb.cli import run_options
    from llmb.config.resolve import resolve_all
    from llmb.config.run_list import tasks_for
    from llmb.config.serialization import to_json
    from llmb.launch.command import format_engine_command
    from llmb.launch.install_root import install_root
    from llmb.perfmodel.explain.run_prediction import with_prediction
    from llmb.report.config_summary import describe
    from llmb.report.terminal.colour import print_report

    recipes, install = recipes_for(options), install_root(os.environ)
    resolved, bad = resolve_all(tasks_for(run_options.run_selection(options), recipes), recipes, install)
    for line in bad:
        print(f"ERROR: skipped: {line}", file=sys.stderr)
    if options.memory:
        _show_memory([config for _, config in resolved], options.json)
    else:
        for config in (with_prediction(config, install) for _, config in resolved):
            if options.json:
                print(to_json(config, indent=2))
            else:
                print_report(describe(config, format_engine_command(config)) + "\n")
    return 1 if bad else 0


def _show_memory(configs: list[Any], as_json: bool) -> None:
    """Print memory, FLOPs and collectives of one rank of each run."""
    from llmb.config.serialization import to_json
    from llmb.report.dry_run_text import describe_dry_run

    for config in configs:
        dry_run = _dry_run(config)
        print(to_json(dry_run) if as_json else describe_dry_run(config, dry_run) + "\n", flush=True)


def _dry_run(config: Any) -> Any:
    """Return the dry run of one rank; a line on stderr shows at once that it runs, and for how long."""
    from llmb.launch.torch_process import run_dry_run
    from llmb.report.status_line import StatusLine

    line = StatusLine()
    try:
        return run_dry_run(
            config, lambda seconds: line.draw(f"dry run of one rank of {config.name}: {seconds:.0f} s, often 20 s")
        )
    finally:
        line.close()


def run_completion(options: argparse.Namespace) -> int:
    """Print the shell completion script."""
    import argcomplete

    print(argcomplete.shellcode(["llmb-run", "llmb-install"], shell=options.shell))
    return 0
