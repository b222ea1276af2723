"""Train what a config.json asks for; events go to events.rank<N>.jsonl beside it, the log to stdout.

python -m llmb.train run/config.json
torchrun --nproc-per-node 8 -m llmb.train run/config.json
"""

import os
import sys
from pathlib import Path

from llmb.errors import ConfigError
from llmb.plain import build, read_json
from llmb.spec import RunConfig
from llmb.train.endings import ending, explain
from llmb.train.labels import label_output
from llmb.train.record import Record
from llmb.train.signals import heed_signals


def run(path: Path, record: Record) -> int:
    """Train, and write how it ended; the exit code."""
    error: Exception | None = None
    try:
        config = build(RunConfig, read_json(path), where=path.name)
        from llmb.train.loop import train  # torch takes seconds to import; a wrong file should not wait for it

        train(config, record)
    except Exception as raised:
        error = raised
        if record.rank == 0 or not isinstance(raised, ConfigError):  # all ranks find the same mistake: say it once
            explain(raised)
    end = ending(error, record.rank)
    if path.parent.is_dir():
        record.end(end.status, end.reason, end.guilty_rank)
    return end.exit_code


def main(arguments: list[str]) -> int:
    """The command line: one path."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m llmb.train config.json", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 1
    path = Path(arguments[0])
    record = Record(path.parent, int(os.environ.get("RANK", "0")))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        label_output(record.rank)
    heed_signals(record)
    return run(path, record)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads can abort the interpreter's own shutdown after all work is done
