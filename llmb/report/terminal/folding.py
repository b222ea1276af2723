"""Sentences of a report broken at words where the terminal is narrower.

    fold("note PROXY: a proxy of the model; do not ...", 80)

Rows of tables, which fit by themselves, and what one copies, a command or a path, stay as they are.
"""

import re

INDENT = "  "  # of a line that continues a sentence
UNFOLDED = re.compile(r"(command|run folder|report|profile|trace): |.*\S  ")


def fold(text: str, width: int | None) -> str:
    """Return the text with lines of at most this width where words allow; None: unchanged."""
    characters = list(text)
    for offset in fold_offsets(text, width):
        characters[offset] = f"\n{INDENT}"
    return "".join(characters)


def fold_offsets(text: str, width: int | None) -> list[int]:
    """Return the offsets of the spaces that become line breaks."""
    offsets: list[int] = []
    start = 0
    for line in text.split("\n"):
        if width is not None and len(line) > width and not UNFOLDED.match(line):
            offsets += [start + offset for offset in _line_offsets(line, width)]
        start += len(line) + 1
    return offsets


def _line_offsets(line: str, width: int) -> list[int]:
    offsets: list[int] = []
    first = len(line) - len(line.lstrip())  # no break within the indentation
    room = width
    while len(line) - first > (room if offsets else width - first):
        end = first + room if offsets else width
        offset = line.rfind(" ", first + 1, end + 1)
        offset = line.find(" ", first + 1) if offset < 0 else offset  # a word longer than the line
        if offset < 0:
            break
        offsets.append(offset)
        first, room = offset + 1, width - len(INDENT)
    return offsets
