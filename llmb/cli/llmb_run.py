"""llmb-run: the command line. Commands live in the files beside this one and import what they need when they run, so
that `--help` is instant.

    llmb-run submit -w pretrain_llama3.1 -s 8b --dtype bf16 --scale 1
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from llmb import __version__
from llmb.cli import archive_import, compare_read, list_show, plan, probe_command, submit, tokenize
from llmb.cli.jobs import jobs
from llmb.cli.subcommand import Parser

EXAMPLES = """examples:
  llmb-run list                                                       what can be run
  llmb-run show -w pretrain_llama3.1 -s 405b --dtype fp8 --scale 128  one run in full, before it is run
  llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy   a small stand-in, here and now
  llmb-run jobs                                                       what was run, and how it went
  llmb-run compare L1 L2                                              is the second faster?

exit codes: 0 done, 1 the request is wrong, 2 the system or a run failed
completion: eval "$(llmb-run completion bash)"
"""


def parser() -> argparse.ArgumentParser:
    said = "Benchmark large language models: how fast, is that good, and why."
    top = Parser(prog="llmb-run", description=said, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"llmb {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for part in (submit, list_show, plan, probe_command, jobs, compare_read, archive_import, tokenize):
        part.add_commands(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and turn every failure into one line and an exit code."""
    top = parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(top)
    options = top.parse_args(arguments)
    return guarded(lambda: options.run(options), options.verbose)


def guarded(action: Callable[[], int], verbose: bool) -> int:
    """Run an action; a known error is one line, an unknown one too unless -v asks for the traceback."""
    from llmb.errors import LlmbError

    try:
        code = action()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if _covers_interruption(error):
            return _interrupted()
        if verbose:
            raise
        known = isinstance(error, LlmbError)
        said = str(error) if known else f"internal error: {type(error).__name__}: {error} (-v shows where)"
        print("ERROR: " + " ".join(said.split()), file=sys.stderr)
        return error.exit_code if isinstance(error, LlmbError) else 2


def _interrupted() -> int:
    print("ERROR: interrupted", file=sys.stderr)
    return 130


def _covers_interruption(error: BaseException | None) -> bool:
    """Whether an error came of Ctrl-C: inside an import Python makes a RuntimeError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


if __name__ == "__main__":
    sys.exit(main())
