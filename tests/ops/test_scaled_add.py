"""Scaled add writes where autograd can see it; its kernel: op_cases/loss.py."""

import pytest
import torch

from llmb.ops.loss.scaled_add import scaled_add_

pytest.importorskip("triton")


def test_autograd_notices_the_write(device: torch.device) -> None:
    total = torch.ones(4, device=device)
    version = total._version
    scaled_add_.triton(total, total.clone(), torch.tensor(1.0, device=device), accumulate=True)
    assert total._version > version
