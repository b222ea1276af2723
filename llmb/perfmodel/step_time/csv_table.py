"""Rows of CSV files of published runs: every row is parsed, and damaged files are refused in one line."""

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

from llmb.config.serialization import open_regular_file
from llmb.errors import ConfigError

Row = TypeVar("Row")
SPARE = ""  # name of cells beyond the columns, which no column has


def read_table(
    path: Path,
    parse: Callable[[dict[str, str], int], Row],
    required: Sequence[str],
    spellings: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return the rows of a file, parsed with the number of their line; without a required column none is.

    `spellings`: other names of columns, which stand for them in a file that does not have them.
    """
    try:
        with TextIOWrapper(open_regular_file(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey=SPARE)
            reader.fieldnames = _column_names(reader.fieldnames or (), spellings or {})
            rows = [(cells, reader.line_num) for cells in reader]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows; it needs a line of columns such as {','.join(required)}")
    _check_columns(path, reader.fieldnames, required)
    return [parse(cells, number) for cells, number in rows]


def _column_names(titles: Sequence[str], spellings: Mapping[str, str]) -> list[str]:
    """Return the columns that the titles of a file mean: `Micro-batch size` is mbs."""
    names = [re.sub(r"[ -]", "_", title.strip().lower()) for title in titles]
    for index, name in enumerate(names):
        column = spellings.get(name)
        if column is not None and column not in names:
            names[index] = column
    return names


def _check_columns(path: Path, columns: Sequence[str], required: Sequence[str]) -> None:
    repeated = [name for name, count in Counter(columns).items() if count > 1 and name]
    if repeated:
        raise ConfigError(f"{path}: column {repeated[0]} occurs {columns.count(repeated[0])} times")
    if missing := [name for name in required if name not in columns]:
        line = ",".join(required)
        raise ConfigError(f"{path} has no column {missing[0]}; its first line names columns such as {line}")


def named_cells(cells: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column; a row with more cells than columns is refused."""
    if any(text.strip() for text in cells.get(SPARE) or ()):
        raise ConfigError(f"{len(cells[SPARE])} cells more than columns")
    return {name: _whole((text or "").strip()) for name, text in cells.items() if name}


def _whole(text: str) -> str:
    """Return a whole number as one, where a table of floats was written."""
    return text.split(".")[0] if re.fullmatch(r"[0-9]{1,9}\.0+", text) else text


def whole_cell(cells: dict[str, str], name: str, least: int = 0) -> int | None:
    """Return the whole number in a cell; None where it is empty."""
    text = cells.get(name, "")
    if text and (not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least):
        raise ConfigError(f"{name} must be a whole number{', 1 or more' if least else ''}, got {text[:60]!r}")
    return int(text) if text else None


def describe_unused(cells: dict[str, str], columns: Sequence[str]) -> str | None:
    """Return a line about the columns of a file that mean nothing here; None: there are none."""
    unused = [name for name in cells if name not in columns and name]
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
