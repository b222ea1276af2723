"""Serve the model of a config.json over HTTP; `llmb-run serve` writes one and starts this.

python -m llmb.serve.http run/config.json --port 8000
"""

import argparse
import sys
from pathlib import Path

from llmb.config.native.serving_support import check_serving_layout, supported_serving
from llmb.config.serialization import build, read_json
from llmb.config.server_options import add_server_options, server_options
from llmb.config.spec import RunConfig
from llmb.loadgen.event_loop import run_loop
from llmb.runtime.engine_process import exit_now
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.run_ending import ending_of, print_error

ENGINE_NAME = "llmb.serve.http"


def main(arguments: list[str]) -> int:
    """Run the command line; record how the server ended; return its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {ENGINE_NAME}", description=__doc__)
    parser.add_argument("config", type=Path, help="config.json of a run folder")
    add_server_options(parser)
    options = parser.parse_args(arguments)
    recorder = EventRecorder(options.config.parent, 0)
    try:
        config = build(RunConfig, read_json(options.config), where=options.config.name)
        supported_serving(config)
        check_serving_layout(config)
        from llmb.serve.http.http_server import HttpServer

        code = run_loop(HttpServer(options.config, config, server_options(options)).run())
    except Exception as error:
        print_error(ENGINE_NAME, error)
        ending = ending_of(error)
        code, status, reason = ending.exit_code, ending.status, ending.reason
    else:
        status, reason = ("ok", None) if code == 0 else ("failed", "an engine process ended")
    if options.config.parent.is_dir():
        recorder.end(status, reason)
    return code


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
