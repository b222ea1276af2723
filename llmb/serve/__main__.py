"""Serve what a config.json asks for and measure it; events go to events.rank<N>.jsonl beside it, the log to stdout.

python -m llmb.serve run/config.json
torchrun --nproc-per-node 8 -m llmb.serve run/config.json
"""

import sys

from llmb.runtime.engine_process import Process, Run, leave


def serving() -> Run:
    """What serves, imported when it is needed."""
    from llmb.serve.benchmark.serving_benchmark import serve

    return serve


process = Process("llmb.serve", serving)
main, run = process.main, process.run

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
