"""Engine `openai`: `python -m llmb.loadgen config.json` runs the load of a configuration and records its events."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from llmb.config.load_settings import config_from_json, load_settings_of
from llmb.config.serialization import read_json
from llmb.errors import ConfigError, LlmbError
from llmb.events import RunEnded, append
from llmb.loadgen.load_test import run_load


def main(arguments: list[str]) -> int:
    """Run the command line, which is one path."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m llmb.loadgen config.json", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 1
    path = Path(arguments[0])
    events = path.parent / "events.rank0.jsonl"
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        settings = load_settings_of(config_from_json(read_json(path), path.name))
        if settings is None:
            raise ConfigError(f"{path.name} is not the configuration of a load: it has no base_url")
        outcome = run_load(settings, lambda event: append(events, event), lambda line: print(line, flush=True))
        return {"ok": 0}.get(outcome.status, 2)
    except KeyboardInterrupt:
        return _end(events, "incomplete", "interrupted before the first request was measured", 2)
    except LlmbError as error:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
        return _end(events, "failed", str(error), error.exit_code)


def _end(events: Path, status: str, reason: str, code: int) -> int:
    append(events, RunEnded(time=time.time(), status=status, reason=reason))  # type: ignore[arg-type]
    return code


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
