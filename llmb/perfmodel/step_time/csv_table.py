"""Rows of CSV files of published runs: every row is parsed, and damaged files are refused in one line."""

import csv
import math
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TypeVar

from llmb.config.serialization import open_regular_file
from llmb.errors import ConfigError

Row = TypeVar("Row")


def read_table(path: Path, parse: Callable[[dict[str, str], int], Row], columns: str) -> list[Row]:
    """Return the rows of a file, parsed with the number of their line; `columns`: those that a message names."""
    try:
        with TextIOWrapper(open_regular_file(path), encoding="utf-8", newline="") as file:
            rows = [parse(cells, number) for number, cells in enumerate(csv.DictReader(file), 2)]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows; it needs a line of columns such as {columns}")
    return rows


def describe_unused(cells: dict[str, str], columns: Sequence[str]) -> str | None:
    """Return a line about the columns of a file that mean nothing here; None: there are none."""
    unused = [name for name in cells if name not in columns]
    return f"columns that are not used: {', '.join(unused)}; columns are: {', '.join(columns)}" if unused else None


def positive_cell(cells: dict[str, str], name: str) -> float | None:
    """Return the number in a cell, above 0; None where it is empty."""
    text = cells.get(name, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {text!r}")
    return number
