"""Out-of-memory errors of torch, the driver and libraries are recognized."""

import pytest
import torch

from llmb.runtime.process_memory import is_out_of_memory, peak_bytes, requested_bytes


def test_out_of_memory_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_requested_bytes() -> None:
    assert (
        requested_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0")) == 1.5 * 2**30
    )
    assert requested_bytes(MemoryError()) == 0.0


def test_peak_bytes() -> None:
    assert peak_bytes(torch.device("cpu")) > 2**20
