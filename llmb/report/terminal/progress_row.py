"""One row of a terminal: a bar, how much is done, and text, cut to the width so that it never wraps."""

from io import StringIO

BAR_FRACTION = 1 / 8  # of the width
NARROW = 60  # columns, below which the text is worth more than a bar


def progress_row(text: str, fraction: float | None, width: int, colour: bool) -> str:
    """Return one row of less than `width` cells, with a bar where the fraction done is known."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 1))
    line = Text(text, no_wrap=True, overflow="ellipsis")
    if fraction is None or width < NARROW:
        row.add_row(line)
    else:
        percent = Text(f"{100 * fraction:3.0f} %", no_wrap=True)
        cells = int(width * BAR_FRACTION)
        row.add_row(ProgressBar(1.0, fraction, cells, complete_style="cyan", finished_style="green"), percent, line)
    captured = StringIO()
    # One column stays free: a terminal may wrap once its last one is written.
    console = Console(
        file=captured, force_terminal=True, width=max(width - 1, 1), no_color=not colour, legacy_windows=False
    )
    console.print(row, end="")
    return captured.getvalue().partition("\n")[0]
