"""Predictions of the rows of a CSV file, of training steps or of serving loads, as JSON or as a table."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llmb.errors import ConfigError
from llmb.perfmodel.step_time.cluster_fabric import Device, device
from llmb.perfmodel.step_time.csv_table import describe_unused
from llmb.perfmodel.step_time.setup_fields import changed_device
from llmb.report.table import render

Data = dict[str, Any]
Predict = Callable[[Any, Device | None], Data]  # a setup and, with --what-if, another device -> what JSON shows
Cells = dict[str, Callable[[Data], Any]]  # of a table, by title
SETUP: Cells = {
    "row": lambda item: item["row"],
    "model": lambda item: item["model"],
    "GPUs": lambda item: f"{item['gpus']} {item['gpu']}",
    "dtype": lambda item: item["dtype"],
}


def print_row_predictions(
    rows: Sequence[Any],
    columns: Sequence[str],
    predict: Predict,
    what_if: str | None,
    as_json: bool,
    figures: Cells,
) -> int:
    """Print the prediction of every row, and why where there is none; return the exit code.

    `columns` are those that count, `figures` the cells that a terminal shows beside what was predicted.
    """
    if unused := describe_unused(rows[0].cells, columns):
        print(unused, file=sys.stderr)
    if what_if and (described := [row.setup for row in rows if row.setup is not None]):
        changed_device(device(described[0].gpu), what_if)  # a mistake in it is not one of a row
    data = [{"row": row.number, **_row_data(row, predict, what_if)} for row in rows]
    predicted = [item for item in data if "error" not in item]
    if as_json:
        print("[" + ",\n".join(map(json.dumps, data)) + "]")
    else:
        table = SETUP | figures
        if predicted:
            print(render(tuple(table), [tuple(cell(item) for cell in table.values()) for item in predicted]))
        for item in data:
            if "error" in item:
                print(f"row {item['row']}: {item['error']}", file=sys.stderr)
    return 0 if predicted else 1


def _row_data(row: Any, predict: Predict, what_if: str | None) -> Data:
    if row.setup is None:
        return {"error": row.reason}
    try:
        return predict(row.setup, changed_device(device(row.setup.gpu), what_if) if what_if else None)
    except ConfigError as error:
        return {"error": str(error)}
