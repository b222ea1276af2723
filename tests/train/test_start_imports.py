"""Engines on one GPU start and run without torch's compiler and checkpoints, whose imports take seconds."""

import subprocess
import sys

import pytest

SLOW_IMPORTS = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"}
PROGRAM = f"""
import sys
import llmb.offload.offload_loop
import llmb.serve.benchmark.serving_benchmark
from llmb.train.__main__ import main
code = main(sys.argv[1:])
print(code, sorted({SLOW_IMPORTS} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_engines_start_without_torch_dynamo(folder_of) -> None:
    config = folder_of(steps=1) / "config.json"
    output = subprocess.check_output([sys.executable, "-c", PROGRAM, str(config)], text=True)
    assert output.splitlines()[-1] == "0 []"
