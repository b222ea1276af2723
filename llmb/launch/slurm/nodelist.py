"""Names of nodes as Slurm writes them, many in one word: n[1-3,08],gpu-a is n1, n2, n3, n08 and gpu-a."""

import re
from collections.abc import Iterator

_PART = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def node_names(nodelist: str | None) -> tuple[str, ...]:
    """Every node; what is not such a list (null, `(null)`, `None assigned`) names none."""
    if nodelist is None or not re.fullmatch(r"[\w.,\[\]-]+", nodelist):
        return ()
    return tuple(name for part in _PART.findall(nodelist) for name in _names(part))


def _names(part: str) -> Iterator[str]:
    """One word with any number of brackets, each of which stands for several numbers."""
    found = _BRACKETS.search(part)
    if found is None:
        yield part
        return
    before, after = part[: found.start()], part[found.end() :]
    for number in _numbers(found[1]):
        yield from _names(f"{before}{number}{after}")


def _numbers(ranges: str) -> Iterator[str]:
    """The numbers of 1-3,08 with the zeros they are written with."""
    for piece in ranges.split(","):
        first, dash, last = piece.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
        else:
            yield piece
