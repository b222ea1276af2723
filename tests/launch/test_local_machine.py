"""GPUs that the engines do not use are named politely."""

import platform

import pytest

from llmb.launch import local_machine
from llmb.launch.local_machine import unsupported_gpu


@pytest.mark.parametrize(
    ("names", "kfd", "system", "begins"),
    [
        ([], True, ("Linux", "x86_64"), "this machine has an AMD GPU, which the engines do not use"),
        ([], False, ("Darwin", "arm64"), "Apple's GPU is not used"),
        ([], False, ("Linux", "aarch64"), None),
        (["NVIDIA H200"], True, ("Linux", "x86_64"), None),
    ],
)
def test_gpu_of_another_maker_is_said_to_be_unused(monkeypatch, tmp_path, names, kfd, system, begins):
    monkeypatch.setattr(local_machine, "gpu_names", lambda: names)
    monkeypatch.setattr(platform, "system", lambda: system[0])
    monkeypatch.setattr(platform, "machine", lambda: system[1])
    device = tmp_path / "kfd"
    if kfd:
        device.touch()
    line = unsupported_gpu(device)
    assert line is None if begins is None else (line.startswith(begins) and line.endswith("runs here are on the CPU"))
