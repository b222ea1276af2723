"""Serve what a config.json asks for and measure it; events go to events.rank<N>.jsonl beside it, the log to stdout.

python -m llmb.infer run/config.json
torchrun --nproc-per-node 8 -m llmb.infer run/config.json
"""

import sys

from llmb.rank.process import Process, Run, leave


def serving() -> Run:
    """What serves, imported when it is needed."""
    from llmb.infer.benchmark import serve

    return serve


process = Process("llmb.infer", serving)
main, run = process.main, process.run

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
