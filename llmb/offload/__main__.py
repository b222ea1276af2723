"""Train out of core as a config.json says; events go to events.rank0.jsonl beside it, the log to stdout.

python -m llmb.offload run/config.json
"""

import os
import sys

from llmb.runtime.engine_process import EngineProcess, Run, exit_now

# The workspace is allocated in many sizes; expandable segments let one size use what another has freed.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def training() -> Run:
    """Return the training function, imported when it is needed."""
    from llmb.offload.offload_loop import train

    return train


process = EngineProcess("llmb.offload", training)
main, run = process.main, process.run

if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
