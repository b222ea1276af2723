"""The life of an engine's process: read config.json, run, write how it ended, exit with the code that says so.

    Process("llmb.train", training).main(sys.argv[1:])

The function that runs a configuration is asked for only once the file is read: torch takes seconds to import, and a
wrong file should not wait for it.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llmb.config.serialization import build, read_json
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.runtime.rank_prefix import label_output
from llmb.runtime.recorder import Record
from llmb.runtime.run_ending import ending, explain
from llmb.runtime.signals import heed_signals

Run = Callable[[RunConfig, Record], None]


@dataclass(frozen=True)
class Process:
    """An engine's name, as `python -m` knows it, and what gives the function that runs a configuration."""

    engine: str
    load: Callable[[], Run]

    def main(self, arguments: list[str]) -> int:
        """The command line: one path."""
        if len(arguments) != 1 or arguments[0].startswith("-"):
            print(f"usage: python -m {self.engine} config.json", file=sys.stderr)
            return 0 if arguments in (["-h"], ["--help"]) else 1
        path = Path(arguments[0])
        record = Record(path.parent, int(os.environ.get("RANK", "0")))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            label_output(record.rank)
        heed_signals(self.engine, record)
        return self.run(path, record)

    def run(self, path: Path, record: Record) -> int:
        """Run, and write how it ended; the exit code."""
        error: Exception | None = None
        try:
            config = build(RunConfig, read_json(path), where=path.name)
            self.load()(config, record)
        except Exception as raised:
            error = raised
            if record.rank == 0 or not isinstance(raised, ConfigError):  # all ranks find the same mistake: say it once
                explain(self.engine, raised)
        end = ending(error, record.rank)
        if path.parent.is_dir():
            record.end(end.status, end.reason, end.guilty_rank)
        return end.exit_code


def leave(code: int) -> NoReturn:
    """End at once: gloo's threads can abort the interpreter's own shutdown after all work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
