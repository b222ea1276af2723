"""Declaration of subcommands: one-line errors, examples in the help, the function to run."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Argument parser that reports a mistake in one line, exits with 1 and accepts no abbreviated options."""

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": formatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"ERROR: {message} (see {self.prog} --help)\n")


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, *examples: str
) -> argparse.ArgumentParser:
    """Declare a command; `examples` end its help."""
    epilog = "examples:\n" + "".join(f"  {line}\n" for line in examples) if examples else None
    parser = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
    parser.set_defaults(run=run)
    return parser
