"""Imports of a source file, wherever they stand in it."""

import ast
from functools import cache
from pathlib import Path


@cache
def imported_names(path: Path) -> set[str]:
    """Return full names: the modules, and what is imported from them, which may be modules too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names
