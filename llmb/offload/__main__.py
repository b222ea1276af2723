"""Train out of core what a config.json asks for; events go to events.rank0.jsonl beside it, the log to stdout.

python -m llmb.offload run/config.json
"""

import os
import sys

from llmb.runtime.engine_process import Process, Run, leave

# Beside the slab memory is taken in many sizes; with this what one size leaves is used by another.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def training() -> Run:
    """What trains, imported when it is needed."""
    from llmb.offload.offload_loop import train

    return train


process = Process("llmb.offload", training)
main, run = process.main, process.run

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
