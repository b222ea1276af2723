"""How every command is declared: a one-line mistake, examples in the help, the function that runs it."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line and exits 1, as every wrong request does; takes no half-written option."""

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": formatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"ERROR: {message} (see {self.prog} --help)\n")


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], said: str, *examples: str
) -> argparse.ArgumentParser:
    """Declare a command; `examples` end its help."""
    epilog = "examples:\n" + "".join(f"  {line}\n" for line in examples) if examples else None
    parser = commands.add_parser(name, help=said, description=said, epilog=epilog)
    parser.set_defaults(run=run)
    return parser
