"""`llmb-run list` and `llmb-run show`: what can be run, and one run in full before it is run."""

import argparse
import json
import sys
from typing import Any

from llmb.cli.run_options import add_run_options, complete_with, examples, load_recipes
from llmb.cli.subcommand import command

FIRST_CELLS = ("size", "gpu", "dtype", "gpus")


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
    rehearsed = "one rank at full size, without a GPU: memory, FLOPs and exchanges of a step (training; needs torch)"
    show.add_argument("--memory", action="store_true", help=rehearsed)
    show.add_argument(
        "--json", action="store_true", help="as JSON: the resolved configuration, or what --memory counted"
    )

    source = 'eval "$(llmb-run completion bash)"'
    completion = command(commands, "completion", run_completion, "print the shell completion script", source)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))


def run_list(options: argparse.Namespace) -> int:
    """All workloads in a line each, or one in detail."""
    from llmb.report.table import render

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
        print(render(header, rows) + "\n\nmore: llmb-run list -w WORKLOAD; any of them here, small: --proxy")
    return 0


def _list_one(options: argparse.Namespace, recipes: dict[str, Any]) -> int:
    """Rows, stand-ins and published results of one workload."""
    from llmb.config.row_selection import SCALED_DOWN
    from llmb.config.run_list import split_target
    from llmb.report.table import render

    recipe, size = split_target(options.workload, recipes)
    rows = [row for row in recipe.rows if size in (None, row["size"])]
    if options.json:
        print(json.dumps({"workload": recipe.workload, "rows": rows, "proxies": recipe.proxies,
                          "references": recipe.references}))  # fmt: skip
        return 0
    header = ["size", "gpu", "dtype", "gpus", *dict.fromkeys(k for row in rows for k in row if k not in FIRST_CELLS)]
    print(f"{recipe.workload}: {recipe.title}\n")
    print(render(header, [[_text(row.get(cell)) for cell in header] for row in rows]))
    sizes = ", ".join(recipe.values("size", True, size=size))
    scale = "; any --scale, with a layout above scaled down" if recipe.kind in SCALED_DOWN else ""
    print(f"\nstand-ins (--proxy): {sizes}{scale}; `llmb-run show ... --proxy` says what one leaves out")
    if recipe.references:
        cells = [k for k in dict.fromkeys(k for r in recipe.references for k in r) if k not in ("note", "plan")]
        print("\npublished results\n" + render(cells, [[_text(r.get(c)) for c in cells] for r in recipe.references]))
    return 0


def _text(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def run_show(options: argparse.Namespace) -> int:
    """The resolved configuration of one run, or of several one after the other."""
    from llmb.cli import run_options
    from llmb.config.run_list import tasks_for
    from llmb.config.serialization import to_json
    from llmb.launch.command import spelled_command
    from llmb.report.config_summary import describe

    recipes = run_options.load_recipes()
    resolved, bad = run_options.resolve_all(tasks_for(run_options.wanted(options), recipes), recipes)
    for line in bad:
        print(f"ERROR: skipped: {line}", file=sys.stderr)
    if options.memory:
        _show_memory([config for _, config in resolved], options.json)
    else:
        for _, config in resolved:
            print(to_json(config, indent=2) if options.json else describe(config, spelled_command(config)) + "\n")
    return 1 if bad else 0


def _show_memory(configs: list[Any], as_json: bool) -> None:
    """What one rank of each run would hold, compute and send."""
    from llmb.config.serialization import to_json
    from llmb.launch.dry_run_process import rehearse
    from llmb.report.dry_run_text import describe_rehearsal

    for config in configs:
        found = rehearse(config)
        print(to_json(found) if as_json else describe_rehearsal(config, found) + "\n", flush=True)


def run_completion(options: argparse.Namespace) -> int:
    """The script to source; needs nothing but argcomplete, which llmb brings along."""
    import argcomplete

    print(argcomplete.shellcode(["llmb-run", "llmb-install"], shell=options.shell))
    return 0
