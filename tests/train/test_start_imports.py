"""Engines are imported without torch's compiler, DTensor and checkpoints, whose imports take seconds."""

import subprocess
import sys

import pytest

SLOW_IMPORTS = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"}
PROGRAM = f"""
import sys
import llmb.offload.offload_loop
import llmb.serve.benchmark.serving_benchmark
import llmb.train.loop
print(sorted({SLOW_IMPORTS} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_engines_are_imported_without_torch_dynamo() -> None:
    assert subprocess.check_output([sys.executable, "-c", PROGRAM], text=True) == "[]\n"
