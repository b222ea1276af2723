"""Write the picture of a terminal in README.md: a proxy is trained here, and its output drawn as SVG.

python docs/terminal_picture.py docs/pictures/terminal.svg            half a minute on two cores
"""

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
COLUMNS = 80
COMMANDS = (
    "llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy",
    "llmb-run jobs",
)


def main(picture: Path) -> None:
    """Run the commands as in a terminal and draw what they print."""
    with tempfile.TemporaryDirectory() as home:
        texts = [f"$ {command}\n{terminal_output(command, home)}" for command in COMMANDS]
        session = "\n".join(texts).replace(home, "~")
    picture.write_text(svg(session))


def terminal_output(command: str, home: str) -> str:
    """Return what a command prints to a terminal, without its progress bar, which is on the standard error."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("LLMB_INSTALL", "NO_COLOR")}
    environment = {**inherited, "HOME": home, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    screen, terminal = pty.openpty()
    arguments = [sys.executable, "-m", "llmb.cli.llmb_run", *command.split()[1:]]
    process = subprocess.Popen(arguments, env=environment, cwd=ROOT, stdout=terminal, stderr=subprocess.DEVNULL)
    os.close(terminal)
    chunks = []
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(screen, 65536):
            chunks.append(chunk)
    os.close(screen)
    if process.wait() != 0:
        raise SystemExit(f"{command}: exit code {process.returncode}")
    return b"".join(chunks).decode().replace("\r\n", "\n")


def svg(session: str) -> str:
    """Draw text with escape codes; no font is loaded from elsewhere."""
    console = Console(record=True, width=COLUMNS + 1, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text.from_ansi(session), soft_wrap=True)
    drawn = console.export_svg(title="llmb", unique_id="llmb")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
