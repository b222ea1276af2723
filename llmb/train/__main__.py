"""Train what a config.json asks for; events go to events.rank<N>.jsonl beside it, the log to stdout.

python -m llmb.train run/config.json
torchrun --nproc-per-node 8 -m llmb.train run/config.json
"""

import sys

from llmb.runtime.engine_process import Process, Run, leave


def training() -> Run:
    """What trains, imported when it is needed."""
    from llmb.train.loop import train

    return train


process = Process("llmb.train", training)
main, run = process.main, process.run

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
