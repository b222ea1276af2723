"""Lengths of requests from a file of measured pairs, and text files of the user.

read_length_pairs(Path("lengths.csv")) -> [(812, 96), ...]       # lines "input,output", or JSON [input, output]
"""

from pathlib import Path

from llmb.config.serialization import open_regular_file, parse_json
from llmb.errors import ConfigError

LONGEST = 100_000_000  # tokens; beyond that a number in a file is a mistake


def read_length_pairs(path: Path) -> list[tuple[int, int]]:
    """Read pairs of input and output length; a first line of column names is skipped."""
    pairs = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip() or (number == 1 and line[:1].isalpha()):
            continue
        try:
            values = parse_json(line) if line.lstrip().startswith("[") else line.replace(",", " ").split()
            isl, osl = (int(value) for value in values)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path} line {number}: expected an input and an output length, got {line!r}") from error
        if not (1 <= isl <= LONGEST and 1 <= osl <= LONGEST):
            raise ConfigError(f"{path} line {number}: lengths must be 1 or more, got {isl} and {osl}")
        pairs.append((isl, osl))
    if not pairs:
        raise ConfigError(f"{path} holds no lengths")
    return pairs


def read_text(path: Path, noun: str = "") -> str:
    """Read a text file of the user; a ConfigError says why it cannot be read. `noun`: what it should be."""
    try:
        with open_regular_file(path) as file:
            return file.read().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {noun}{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{noun}{path} is not text: {error.reason} at byte {error.start}") from error
