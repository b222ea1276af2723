"""Run the serving benchmark of a config.json; events go to events.rank<N>.jsonl beside it, the log to stdout.

python -m llmb.serve run/config.json
torchrun --nproc-per-node 8 -m llmb.serve run/config.json
"""

import sys

from llmb.runtime.engine_process import EngineProcess, Run, exit_now


def import_serve() -> Run:
    """Import and return the benchmark, lazily, as it needs torch."""
    from llmb.serve.benchmark.serving_benchmark import serve

    return serve


process = EngineProcess("llmb.serve", import_serve)
main, run = process.main, process.run

if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
