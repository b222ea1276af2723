"""Memory that runs out is recognised, whoever says so and however."""

import pytest
import torch

from llmb.runtime.process_memory import bytes_asked, is_out_of_memory, peak_bytes


def test_a_shortage_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_what_was_asked_for() -> None:
    assert bytes_asked(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0")) == 1.5 * 2**30
    assert bytes_asked(MemoryError()) == 0.0


def test_a_process_has_a_peak() -> None:
    assert peak_bytes(torch.device("cpu")) > 2**20
