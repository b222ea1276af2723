"""Expansion of Slurm's hostlists: n[1-3,08],gpu-a is n1, n2, n3, n08 and gpu-a."""

import re
from collections.abc import Iterator

_ITEM = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def node_names(nodelist: str | None) -> tuple[str, ...]:
    """Return every node of a hostlist; anything else (None, `(null)`, `None assigned`) names none."""
    if nodelist is None or not re.fullmatch(r"[\w.,\[\]-]+", nodelist):
        return ()
    return tuple(name for item in _ITEM.findall(nodelist) for name in _names(item))


def _names(item: str) -> Iterator[str]:
    """Expand an item with any number of brackets, each of which stands for several numbers."""
    brackets = _BRACKETS.search(item)
    if brackets is None:
        yield item
        return
    prefix, suffix = item[: brackets.start()], item[brackets.end() :]
    for number in _numbers(brackets[1]):
        yield from _names(f"{prefix}{number}{suffix}")


def _numbers(ranges: str) -> Iterator[str]:
    """Expand 1-3,08, leading zeros included."""
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
        else:
            yield item
