"""An engine process from start to exit: read config.json, run, record how it ended, exit with the matching code.

    EngineProcess("llmb.train", load_train).main(sys.argv[1:])

The function that runs a configuration is loaded only after the file is read: importing torch takes seconds, and an
invalid file should be reported before that.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llmb.config.serialization import build, read_json
from llmb.config.spec import RunConfig
from llmb.runtime.rank_prefix import prefix_output
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.run_ending import ending_of, print_error
from llmb.runtime.signals import install_signal_handlers

Run = Callable[[RunConfig, EventRecorder], None]


@dataclass(frozen=True)
class EngineProcess:
    """Process of an engine: its name for `python -m`, and a loader of the function that runs a configuration."""

    engine: str
    load: Callable[[], Run]

    def main(self, arguments: list[str]) -> int:
        """Run the command line, which is one path."""
        if len(arguments) != 1 or arguments[0].startswith("-"):
            print(f"usage: python -m {self.engine} config.json", file=sys.stderr)
            return 0 if arguments in (["-h"], ["--help"]) else 1
        path = Path(arguments[0])
        recorder = EventRecorder(path.parent, int(os.environ.get("RANK", "0")))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            prefix_output(recorder.rank)
        install_signal_handlers(self.engine, recorder)
        return self.run(path, recorder)

    def run(self, path: Path, recorder: EventRecorder) -> int:
        """Run, record how it ended and return the exit code."""
        error: Exception | None = None
        try:
            config = build(RunConfig, read_json(path), where=path.name)
            self.load()(config, recorder)
        except Exception as raised:
            error = raised
            print_error(self.engine, raised)
        ending = ending_of(error, recorder.rank)
        if path.parent.is_dir():
            recorder.end(ending.status, ending.reason, ending.failed_rank)
        return ending.exit_code


def exit_now(code: int) -> NoReturn:
    """Exit without interpreter shutdown, which gloo's threads can abort after all work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
