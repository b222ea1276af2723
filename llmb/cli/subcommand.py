"""Declaration of subcommands: one-line errors, examples in the help, the function to run, and `help [COMMAND]`."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

NUMBERS: Mapping[Any, str] = {int: "a whole number", float: "a number"}


class Parser(argparse.ArgumentParser):
    """Argument parser that reports a mistake in one line, exits with 1 and accepts no abbreviated options."""

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": formatter, **options})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the nearest command or choice, where argparse only lists all of them."""
        if action.choices is not None and value not in action.choices:
            from llmb.errors import UnknownName

            option = "/".join(action.option_strings) or action.dest
            kind = "command" if isinstance(action.choices, Mapping) else f"value of {option}:"
            raise argparse.ArgumentError(None, str(UnknownName(kind, value, action.choices)))

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """Convert an argument; say what was expected in the user's words, not by the name of a Python type."""
        try:
            return super()._get_value(action, text)  # type: ignore[misc]
        except argparse.ArgumentError:
            if action.type not in NUMBERS:
                raise
            option = "/".join(action.option_strings) or action.metavar or action.dest
            raise argparse.ArgumentError(None, f"{option}: expected {NUMBERS[action.type]}, got {text!r}") from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown option where its command is known, so that the message names that command's help."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from difflib import get_close_matches

            nearest = get_close_matches(unknown[0].split("=")[0], self._option_string_actions, n=1)
            hint = f" (did you mean {nearest[0]}?)" if nearest else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"ERROR: {message} (see {self.prog} --help)\n")


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, *examples: str
) -> argparse.ArgumentParser:
    """Declare a command; `examples` end its help."""
    epilog = "examples:\n" + "".join(f"  {line}\n" for line in examples) if examples else None
    parser = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
    parser.set_defaults(run=run)
    # Without a default, which would overwrite the value given before the command.
    parser.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def add_help_command(top: argparse.ArgumentParser, commands: Any) -> None:
    """Declare `help [COMMAND]`, which prints what `COMMAND --help` prints."""

    def run(options: argparse.Namespace) -> int:
        top.parse_args([*options.topic, "--help"])  # prints and exits
        return 0

    parser = command(commands, "help", run, "print the help of a command")
    parser.add_argument(
        "topic", nargs="*", metavar="COMMAND", help="such as submit, or jobs show; default: all commands"
    )
