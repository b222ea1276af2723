"""Run the training of a config.json; events go to events.rank<N>.jsonl beside it, the log to stdout.

python -m llmb.train run/config.json
torchrun --nproc-per-node 8 -m llmb.train run/config.json
"""

import sys

from llmb.runtime.engine_process import EngineProcess, Run, exit_now


def load_train() -> Run:
    """Import the training loop, which imports torch, only when it is needed."""
    from llmb.train.loop import train

    return train


process = EngineProcess("llmb.train", load_train)
main, run = process.main, process.run

if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
