"""Command line llmb-run. Subcommands are in the files beside this one and import what they need when they run, so that
`--help` is instant.

    llmb-run submit -w pretrain_llama3.1 -s 8b --dtype bf16 --scale 1
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llmb import __version__
from llmb.cli import (
    archive_import,
    list_show,
    load,
    plan,
    read_timing,
    serve,
    submit,
    tokenize,
)
from llmb.cli.compare import ab_command, compare_command, exemplar_command, gate_command
from llmb.cli.explain import explain_command
from llmb.cli.jobs import jobs
from llmb.cli.machine import doctor_command, probe_command
from llmb.cli.predictions import predict
from llmb.cli.report import report_command
from llmb.cli.subcommand import Parser, add_help_command
from llmb.cli.sweep import sweep_command
from llmb.cli.tune import tune_command

EXAMPLES = """examples: what can be run; one run in full; a small proxy here and now; outcomes
  llmb-run list
  llmb-run show -w pretrain_llama3.1 -s 8b --dtype fp8 --scale 8 --gpu-type h100
  llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy
  llmb-run jobs
  llmb-run compare L1 L2
  llmb-run report L1

exit codes: 0 success, 1 wrong request, 2 the system or a run failed
completion: eval "$(llmb-run completion bash)"
"""
MODULES: tuple[Any, ...] = (
    submit, serve, load, sweep_command, list_show, plan, predict, explain_command, tune_command, probe_command,
    doctor_command, jobs, compare_command, ab_command, gate_command, exemplar_command, report_command, read_timing,
    archive_import, tokenize,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    summary = "Benchmark large language models: how fast, is that good, and why."
    top = Parser(prog="llmb-run", description=summary, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"llmb {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show tracebacks; also after the command")
    top.set_defaults(run=lambda _: _print_help(top))  # without a command
    commands = top.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for module in MODULES:
        module.add_commands(commands)
    add_help_command(top, commands)
    return top


def _print_help(top: argparse.ArgumentParser) -> int:
    top.print_help()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and turn every failure into one line and an exit code."""
    top = parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(top)
    options = top.parse_args(arguments)
    return guarded(lambda: options.run(options), options.verbose)


def guarded(action: Callable[[], int], verbose: bool) -> int:
    """Run an action; any error is one line, with a traceback only for unexpected ones under -v."""
    from llmb.report.terminal.safe_stream import safe_output

    with safe_output():
        return _guarded(action, verbose)


def _guarded(action: Callable[[], int], verbose: bool) -> int:
    from llmb.errors import LlmbError

    try:
        code = action()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if _covers_interruption(error):
            return _interrupted()
        if verbose:
            raise
        expected = isinstance(error, LlmbError)
        message = str(error) if expected else f"internal error: {type(error).__name__}: {error} (-v shows where)"
        print("ERROR: " + " ".join(message.split()), file=sys.stderr)
        return error.exit_code if isinstance(error, LlmbError) else 2


def _interrupted() -> int:
    print("ERROR: interrupted", file=sys.stderr)
    return 130


def _covers_interruption(error: BaseException | None) -> bool:
    """Return whether an error was caused by Ctrl-C: inside an import Python turns it into a RuntimeError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


if __name__ == "__main__":
    sys.exit(main())
