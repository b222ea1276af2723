"""Families of GPUs that docs/gpus.md lists, and a process that takes itself for one with such a GPU.

`pretend_gpu` comes before the import of ops: these take `capabilities` by name. Tensors are on the meta device, which
counts as a GPU.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from llmb.ops import device_capabilities
from llmb.ops.device_capabilities import DeviceCapabilities

MIN_FP8 = 89  # compute capability below which fp8 is refused


@dataclass(frozen=True, kw_only=True)
class GpuFamily:
    """GPUs of one compute capability."""

    compute: tuple[int, int]
    gpus: str
    shared_kib: int  # that a block may take
    sms: int  # of one of these GPUs

    @property
    def target(self) -> int:
        """The compute capability as Triton has it."""
        return 10 * self.compute[0] + self.compute[1]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.compute))

    @property
    def shared_bytes(self) -> int:
        return self.shared_kib << 10


FAMILIES = {
    family.target: family
    for family in (
        GpuFamily(compute=(8, 0), gpus="A100", shared_kib=163, sms=108),
        GpuFamily(compute=(8, 6), gpus="RTX 3090, A10G", shared_kib=99, sms=82),
        GpuFamily(compute=(8, 9), gpus="RTX 4090, L40S, L4", shared_kib=99, sms=128),
        GpuFamily(compute=(9, 0), gpus="H100, H200, H20, GH200", shared_kib=227, sms=132),
        GpuFamily(compute=(10, 0), gpus="B200, GB200", shared_kib=227, sms=148),
        GpuFamily(compute=(10, 3), gpus="B300, GB300", shared_kib=227, sms=148),
        GpuFamily(compute=(12, 0), gpus="RTX 5090, RTX PRO 6000", shared_kib=99, sms=188),
    )
}


def pretend_gpu(family: GpuFamily) -> None:
    """Make this process one with a GPU of the family, until it exits; optional packages count as not installed."""
    gpu = DeviceCapabilities(
        compute=family.compute, sms=family.sms, shared_memory_bytes=family.shared_bytes, cuda=(13, 0)
    )
    replace_for_good(device_capabilities, "capabilities", lambda _device: gpu)
    replace_for_good(torch.cuda, "is_available", lambda: True)
    replace_for_good(torch.cuda, "current_device", lambda: 0)
    replace_for_good(torch.cuda, "is_current_stream_capturing", lambda: False)
    replace_for_good(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "meta"))
    dispatch = importlib.import_module("llmb.ops.dispatch")
    replace_for_good(dispatch, "is_dry_run", lambda: True)  # every tensor counts as one on a GPU
    replace_for_good(dispatch, "begin_dry_run", lambda _listener: None)  # which would replace Triton
    for name in ("softcap_attention", "softcap_attention_triton"):  # a dry run has other attention in their place
        replace_for_good(importlib.import_module(f"llmb.ops.softcap.{name}"), "is_dry_run", lambda: False)


def replace_for_good(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or a class, for the life of this process."""
    setattr(owner, name, value)
