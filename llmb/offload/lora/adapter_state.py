"""Adapters of a run with their gradients and optimizer state, all in one device buffer, and their update.

    state = AdapterState(model, plan, arena.buffer("adapters", 0))
    state.initialise(seed)
    state.begin_step()                          # before the first gradient
    state.update(AdamStep(number=3, lr=1e-4), factor, seed)
    state.tensors()                             # for a checkpoint; the device must be idle

The same AdamW as of buckets, with the weight decay of matrices: `update` of the plan decides how weights are rounded.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.lora_shapes import adapter_numel
from llmb.config.offload_plan import Plan
from llmb.errors import ConfigError
from llmb.models.llama_layer.lora_adapters import LoraAdapters
from llmb.offload.buffer_views import offload_dtypes
from llmb.ops.optim.adam import adam_update
from llmb.runtime import adamw_settings


class AdamStep(NamedTuple):
    """Update of a step."""

    number: int  # from 1
    lr: float


class AdapterState:
    """Everything that LoRA trains."""

    def __init__(self, model: Model, plan: Plan, buffer: Tensor):
        """`buffer`: bytes on the device, as many as the plan counts."""
        assert plan.lora is not None
        dtypes, numel = offload_dtypes(plan), adapter_numel(model, plan.lora)
        weights, grads = numel * dtypes.activation.itemsize, numel * dtypes.grad.itemsize
        weight_bytes, grad_bytes, state_bytes = buffer.split((weights, grads, buffer.numel() - weights - grads))
        self.buffer, self.dtypes = buffer, dtypes
        self.weights, self.grads = dtypes.weights(weight_bytes), dtypes.grads(grad_bytes)
        self.optimizer = dtypes.state(state_bytes)
        self.adapters = LoraAdapters(model, plan.lora, self.weights, self.grads)

    def initialise(self, seed: int) -> None:
        """Set initial weights, and optimizer state to zero."""
        self.buffer.zero_()
        self.adapters.init_weights(seed)

    def begin_step(self) -> None:
        """Clear the gradients, to which all chunks add."""
        self.grads.zero_()

    def update(self, step: AdamStep, factor: Tensor, seed: int) -> None:
        """Update all adapters in one pass; `factor` scales the gradients."""
        m, v, low = self.optimizer.m, self.optimizer.v, self.optimizer.low
        adam_update(
            self.weights, self.grads, m, v, low, lr=step.lr, beta1=adamw_settings.BETAS[0],
            beta2=adamw_settings.BETAS[1], eps=adamw_settings.EPS, weight_decay=adamw_settings.WEIGHT_DECAY,
            step=step.number, factor=factor, rounding=self.dtypes.rounding, seed=(seed << 24) + step.number << 16,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by the names that checkpoints of buckets have."""
        low, m, v = self.optimizer
        tensors = {"param": self.weights, "low": low, "m": m, "v": v}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the tensors of a checkpoint."""
        self.buffer.zero_()
        for name, tensor in self.tensors().items():
            if name not in saved or saved[name].shape != tensor.shape:
                raise ConfigError(f"resume: the checkpoint does not hold {name} of these adapters")
            tensor.copy_(saved[name])
