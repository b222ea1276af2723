"""Devices that a rank takes or refuses."""

import pytest
import torch

from llmb.errors import ConfigError
from llmb.runtime.rank_info import _device


def test_torch_for_amd_gpus_is_refused_in_one_line_and_the_cpu_is_not(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ConfigError, match="is for AMD GPUs, which this engine does not use"):
        _device("mi300x", 0)
    assert _device("cpu", 0) == torch.device("cpu")
