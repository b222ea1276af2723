"""`llmb-run submit` (older name: `single`): resolve, create the run folder, launch, wait, derive the result, print it.

On a cluster it submits all runs to Slurm and exits; inside an allocation (`sbatch -N 2 ./launch.sh`) it runs there.
"""

import argparse
import os
import sys
from collections.abc import Callable
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

from llmb.cli.faults.fault_options import add_fault_options, inject_faults
from llmb.cli.model_run.model_options import add_model_options, recipes_for
from llmb.cli.run_options import add_location_options, add_run_options, examples
from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register submit and single."""
    for name, output in (("submit", "run benchmarks"), ("single", "older name of submit")):
        parser = command(commands, name, run, output, *examples(name, " --dry-run"))
        add_run_options(parser)
        add_model_options(parser)
        add_location_options(parser)
        add = parser.add_argument
        add("-f", "--file", type=Path, help="bulk file: .yaml with sweeps, or the older text format")
        add(
            "--all",
            action="store_true",
            help="every training workload: all sizes, dtypes and scales listed for the GPU",
        )
        add("--yes", action="store_true", help="submit several Slurm jobs without a question, as a script must")
        add("-r", "--repeats", type=int, default=1, metavar="N", help="run each configuration N times")
        add("--env", action="append", default=[], metavar="K=V", help="environment variable for the ranks")
        add("--timeout", type=int, metavar="S", help="the same as --set time_limit_s=S")
        add("--no-report", action="store_true", help="write no report.html when a run ends")
        add_fault_options(parser)
        add("--dry-run", action="store_true", help="print what would run, and run nothing")
        add(
            "-q",
            "--quiet",
            action="store_true",
            help="no progress and no tables: a line for each run here, its outcome",
        )
        add(
            "--json", action="store_true", help="print the stored Result as the last line; with Slurm, one line per job"
        )


def run(options: argparse.Namespace) -> int:
    """Run all tasks of a command line, largest first: one after the other here, all at once on Slurm."""
    from dataclasses import replace

    from llmb.cli import submit_slurm
    from llmb.cli.batch_confirmation import describe_totals
    from llmb.cli.local_check import check_gpus_before_planning, check_runs_here
    from llmb.cli.memory_check import check_memory, misfits, warn
    from llmb.config.resolve import resolve_all
    from llmb.errors import ConfigError
    from llmb.launch.install_root import install_root
    from llmb.launch.local_machine import unsupported_gpu
    from llmb.launch.secrets import mask

    recipes = recipes_for(options)
    tasks, location = tasks_of(options, recipes), submit_slurm.run_location(options, os.environ)
    tasks = submit_slurm.with_cluster_settings(tasks, location, recipes)
    dry = options.dry_run or options.on == "dry"
    if options.one_rank is not None and location != "local":
        raise ConfigError("--one-rank runs on one GPU of this machine, not through Slurm; add --on local")
    if location == "local" and not dry:
        check_gpus_before_planning(tasks, recipes)
    resolved, bad = resolve_all(tasks, recipes, install_root(os.environ))
    resolved = [(task, replace(config, environment=mask(config.environment))) for task, config in resolved]
    resolved = inject_faults(resolved, options)
    for line in bad:
        print(f"ERROR: skipped: {line}", file=sys.stderr)
    if dry:
        _print_dry(resolved, options.json)
        lines = (line for _, config in resolved for line in misfits(config, recipes, local=location == "local"))
        warn(f"would be refused: {line}" for line in lines)
        if (location == "slurm" or options.on == "dry") and not options.json:
            if sum(task.repeats for task, _ in resolved) > 1:
                print(f"\n{describe_totals([(config, task.repeats) for task, config in resolved])}")
            submit_slurm.print_job_scripts(resolved, options)
        return 1 if bad else 0
    if location == "slurm":
        _print_departures(resolved, options.json)
        return max(submit_slurm.submit_all(resolved, options, recipes), 1 if bad else 0)
    submit_slurm.refuse_sbatch_options(options)
    if location == "local":
        for _, config in resolved:
            check_runs_here(config)
        if any(config.launch_machine.gpu == "cpu" for _, config in resolved):
            warn(filter(None, [unsupported_gpu()]))
    else:
        resolved = [(task, submit_slurm.fit_allocation(config, os.environ, options.force)) for task, config in resolved]
    here = [config for _, config in resolved if config.engine != "openai"]
    check_memory(here, recipes, local=location == "local", force=options.force)
    if not options.quiet:
        _print_departures(resolved, options.json)
    requested, codes = sum(task.repeats for task, _ in resolved), []
    for task, config in resolved:
        done, interrupted = run_repeatedly(
            config, task.request.environment, task.repeats, options.json, location, report=not options.no_report,
            quiet=options.quiet,
        )  # fmt: skip
        codes += done
        if interrupted:  # Ctrl-C means the whole command
            break
    failed = sum(code != 0 for code in codes) + requested - len(codes)
    if failed:
        print(f"ERROR: {failed} of {requested} runs failed", file=sys.stderr)
    return max([*codes, 1 if bad else 0])


def _print_departures(resolved: list[tuple[Any, Any]], as_json: bool) -> None:
    """Say what the engine leaves out of the recipe rows, before anything runs."""
    from llmb.config.native.departures import departure_lines

    for line in departure_lines(config for _, config in resolved):
        print(f"departs from the recipe: {line}", file=sys.stderr if as_json else sys.stdout, flush=True)


def tasks_of(options: argparse.Namespace, recipes: dict[str, Any]) -> list[Any]:
    """Return the tasks of the flags or the bulk file; an `--env` that names a setting becomes one."""
    from llmb.cli import run_options
    from llmb.config.bulk_file import read_bulk
    from llmb.config.overrides import Setting, split_environment
    from llmb.config.run_list import largest_first, left_out_dtypes, tasks_for, with_settings
    from llmb.errors import ConfigError
    from llmb.launch.secrets import hidden_by_entropy

    if options.file and (options.workload or options.size or options.all):
        raise ConfigError("-f names the workloads; leave out -w, -s and --all")
    if not options.file and bool((options.workload or "").strip(", ")) == options.all:
        wrong = "--all and -w exclude each other" if options.all else "no workload is named"
        raise ConfigError(f"{wrong}; give -w WORKLOAD (see llmb-run list), a bulk file with -f, or --all")
    environment = parse_environment(options.env)
    settings, for_ranks = split_environment(environment, "--env")
    if options.timeout is not None:
        settings.append(Setting(field="time_limit_s", value=options.timeout, source="--timeout"))
    for name in hidden_by_entropy(for_ranks):
        print(f"--env {name}: its value looks random, so it is treated as a secret and hidden", file=sys.stderr)
    run_selection = run_options.run_selection(options)
    tasks = read_bulk(options.file, recipes, run_selection) if options.file else tasks_for(run_selection, recipes)
    if not options.file and (line := left_out_dtypes(run_selection)) is not None:
        print(f"note: {line}", file=sys.stderr, flush=True)
    return largest_first([with_settings(task, settings, for_ranks) for task in tasks])


def parse_environment(pairs: list[str]) -> dict[str, str]:
    """Return the variables of NAME=VALUE pairs, and hide secret ones from `ps`."""
    from llmb.errors import ConfigError
    from llmb.launch.process_arguments import hide_arguments
    from llmb.launch.secrets import is_secret

    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env: expected NAME=VALUE, got {pair!r}")
        variables[name] = value
    hide_arguments(value for name, value in variables.items() if is_secret(name, value))
    return variables


def _print_dry(resolved: list[tuple[Any, Any]], as_json: bool) -> None:
    from llmb.config.serialization import to_json
    from llmb.launch.command import format_engine_command
    from llmb.launch.install_root import install_root
    from llmb.perfmodel.explain.run_prediction import with_prediction
    from llmb.report.goodput_text import fault_lines
    from llmb.report.predictions.dry_table import dry_table
    from llmb.report.terminal.colour import print_report

    install = install_root(os.environ)
    resolved = [(task, with_prediction(config, install)) for task, config in resolved]
    if as_json:
        for _, config in resolved:
            print(to_json(config))
    else:
        print_report(dry_table([(config, task.repeats) for task, config in resolved]))
        for _, config in resolved:
            if config.fault_injection is not None:
                print(f"\n{config.name}: {fault_lines(config.fault_injection)}")
            if config.engine != "native":
                print(
                    f"\n{config.name}, the command of engine {config.engine}:\n{format_engine_command(config)}", end=""
                )


def run_repeatedly(
    config: Any, environment: dict[str, str], repeats: int, as_json: bool, location: str, report: bool = True,
    quiet: bool = False,
) -> tuple[list[int], bool]:  # fmt: skip
    """Repeat a run and print intervals of its figures; return exit codes and whether it was interrupted."""
    from llmb.config.load_settings import repeat_of
    from llmb.report import repeat_table

    codes: list[int] = []
    results: list[Any] = []
    interrupted = False
    while len(codes) < repeats and not interrupted:
        repeat = repeat_of(config, len(codes))
        code, interrupted, result = run_one(repeat, environment, as_json, location, report=report, quiet=quiet)
        codes.append(code)
        results.append(result)
    table = repeat_table.repeats(results)
    if table and not quiet:
        print(f"\n{table}", file=sys.stderr if as_json else sys.stdout)
    return codes, interrupted


def run_again(config: Any, environment: dict[str, str], retry_of: str, attempt: int) -> int:
    """Retry a run here, linked to the original job; too little memory is only a warning, as it ran before."""
    from llmb.cli.local_check import check_runs_here
    from llmb.cli.memory_check import check_memory

    check_runs_here(config)
    if config.engine != "openai":
        check_memory([config], {}, local=True, force=True)
    return run_one(config, environment, False, "local", retry_of=retry_of, attempt=attempt)[0]


def run_one(
    config: Any,
    environment: dict[str, str],
    as_json: bool,
    location: str,
    *,
    report: bool = True,
    quiet: bool = False,
    python: str = sys.executable,
    **lineage: Any,
) -> tuple[int, bool, Any]:
    """Run once and print the result; return exit code, whether it was interrupted, and the result.

    `lineage`: retry_of and attempt of a retry. `python`: the interpreter of local ranks. `quiet`: print one line.
    """
    from llmb.cli.profile_pictures import describe_profile
    from llmb.cli.report.page_writer import write_report
    from llmb.config.serialization import to_json
    from llmb.report.live_progress import LiveLine
    from llmb.report.screen_summary import closing_text
    from llmb.report.serving_overview import overview
    from llmb.report.terminal.colour import print_report

    output = StringIO() if quiet else sys.stderr if as_json else sys.stdout
    jobs: list[str] = []

    def announce(job: str, run_dir: Any) -> None:
        jobs.append(job)
        run_dir.write_command_line(sys.argv, os.environ)
        print(f"job {job}: {config.name}\nrun folder: {run_dir.short_path}", file=output, flush=True)

    live = LiveLine(config, output if quiet else None)
    try:
        run_dir, outcome, result = execute(config, environment, location, announce, live.show, python=python, **lineage)
    finally:
        live.close()
    below = list(describe_profile(run_dir, config))
    if overview(result, config):
        below.insert(0, f"all figures, in the layout of trtllm-bench: llmb-run jobs log {jobs[0]}")
    other_lines = 3 + report  # job, run folder and progress above, the path of the page below
    print_report(closing_text(result, f"run folder: {run_dir.short_path}", below, other_lines), output)
    if report:
        print(write_report(run_dir), file=output)
    if as_json:
        print(to_json(result))
    elif quiet:
        reason = "" if result.status == "ok" or not result.reason else f" ({result.reason})"
        print(f"{jobs[0]} {result.status}{reason}: {run_dir.short_path}", flush=True)
    refused = outcome.exit_code == 1 and config.engine == "native"  # the engine refused the configuration
    code = 0 if result.status == "ok" else 1 if refused else 2
    return code, outcome.interrupted is not None, result


def execute(
    config: Any,
    environment: dict[str, str],
    location: str,
    announce: Callable[[str, Any], None],
    on_event: Callable[[Any], None],
    python: str = sys.executable,
    **lineage: Any,
) -> tuple[Any, Any, Any]:
    """Run once, from folder to stored result; return run folder, outcome and result.

    Each step leaves a readable folder if the next one fails. `announce` gets job id and folder before the start.
    """
    from contextlib import nullcontext

    from llmb.cli.stored_runs import settle_result
    from llmb.errors import LlmbError
    from llmb.launch.install_root import install_root
    from llmb.launch.restarts.restart_loop import run_with_restarts
    from llmb.launch.run_folder import RunFolder, store_path
    from llmb.launch.run_lock import exclusive_run_lock
    from llmb.perfmodel.explain.run_prediction import with_prediction
    from llmb.report.serving_overview import overview
    from llmb.results.job_store import Store

    root = install_root(os.environ)
    config = with_prediction(config, root)
    lock = exclusive_run_lock(root, config) if location == "local" else nullcontext()
    with lock, Store(store_path(root)) as store:
        run_dir = RunFolder.create(root, config, datetime.now())
        job = _add_job(store, config, run_dir, location, **lineage)
        run_dir.add_short_path(job)
        announce(job, run_dir)
        cause: str | None = None
        try:
            run_dir, outcome = run_with_restarts(
                config, run_dir, lambda this, run: _launch(this, run, environment, on_event, location, python)
            )
        except LlmbError as error:
            cause = str(error)
            raise
        finally:
            run_dir = RunFolder.open(run_dir.path)  # at its last start
            result = settle_result(run_dir, config, cause)
            store.finish(job, result)
    block = overview(result, config)
    if block and config.engine in ("native", "openai"):  # other engines print their own
        run_dir.add_to_log(block)
    return run_dir, outcome, result


def _add_job(store: Any, config: Any, run_dir: Any, location: str, **lineage: Any) -> str:
    """Add the run to the store and its record to its folder; runs in one allocation share Slurm's id."""
    from llmb.launch.slurm.submission import Submission, write_submission

    if location == "local":
        if lineage:
            write_submission(run_dir, Submission(token=None, **lineage))
        job: str = store.add(config, run_dir.path, **lineage)
        run_dir.write_record(config, job)
        return job
    slurm_id = os.environ["SLURM_JOB_ID"]
    run_dir.write_record(config, slurm_id, "slurm", cluster_name=os.environ.get("SLURM_CLUSTER_NAME"))
    return store.add(config, run_dir.path, "slurm", store.free_id(slurm_id), nodes=os.environ.get("SLURM_JOB_NODELIST"))


def _launch(config: Any, run_dir: Any, environment: dict[str, str], on_event: Any, location: str, python: str) -> Any:
    from llmb.cli.run_options import cluster_here
    from llmb.launch.command import engine_command
    from llmb.launch.local import run_local

    if location == "local":
        command = engine_command(config, run_dir, python)
        return run_local(config, run_dir, command, environment, on_event, config.limits.time_limit_s)
    from llmb.cli.job_runner import run_in_allocation
    from llmb.cli.submit_batch import container_flags, rank_settings

    cluster = cluster_here()
    settings = rank_settings(config, environment, cluster)
    flags = container_flags(config, run_dir, settings, cluster)
    return run_in_allocation(config, run_dir, settings, on_event, flags, os.environ)
