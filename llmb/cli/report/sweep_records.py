"""Sweep folders read for a page."""

import os
from pathlib import Path

from llmb.config.serialization import build, read_json
from llmb.loadgen.sweep.sweep_folder import SweepFolder
from llmb.report.page.sweep_page import sweep_page
from llmb.results.sweep.sweep_result import SweepResult


def sweep_html(folder: SweepFolder, page: Path) -> str:
    """Return the page of a sweep, for a file at this path."""
    result = build(SweepResult, read_json(folder.result), "result.json")
    files = [folder.result, folder.csv, folder.svg, folder.plan, folder.points]
    links = [(path.name, os.path.relpath(path, page.parent)) for path in files if path.exists()]
    return sweep_page(result, links)
