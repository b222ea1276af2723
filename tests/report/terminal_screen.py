"""A terminal of a given width that understands what our progress writes: enough to see a stale row."""

import io
import re

TOKEN = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen(io.StringIO):
    """Stream that claims to be a terminal and draws what is written; `resize` reflows rows, as terminals do."""

    def __init__(self, columns: int = 80):
        super().__init__()
        self.columns = columns
        self.rows: list[str] = [""]
        self.row = self.column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for number, command, character in TOKEN.findall(text):
            if command == "A":
                self.row = max(0, self.row - int(number or 1))
            elif command == "J":
                del self.rows[self.row + 1 :]
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._next_row()
            elif character:
                self._put(character)
        return len(text)

    def resize(self, columns: int) -> None:
        reflowed = []
        for row in self.rows:
            reflowed += [row[i : i + columns] for i in range(0, len(row), columns)] or [""]
        self.columns, self.rows = columns, reflowed
        self.row, self.column = len(reflowed) - 1, len(reflowed[-1])

    def _put(self, character: str) -> None:
        if self.column == self.columns:
            self._next_row()
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1

    def _next_row(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")
