"""Engines start and update weights without torch's compiler, DTensor and checkpoints, whose imports take seconds."""

import subprocess
import sys

import pytest

SLOW_IMPORTS = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"}
PROGRAM = f"""
import sys
import llmb.offload.offload_loop
import llmb.serve.benchmark.serving_benchmark
import llmb.train.loop
import torch
from llmb.ops.optim.fused_adamw import FusedAdamW
weight = torch.ones(2)
weight.grad = weight.clone()
FusedAdamW([weight], (0.9, 0.95), 1e-8, 0.1).step(0.1, torch.tensor(1.0), torch.tensor(0.0))
print(sorted({SLOW_IMPORTS} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_engines_run_without_torch_dynamo() -> None:
    assert subprocess.check_output([sys.executable, "-c", PROGRAM], text=True) == "[]\n"
