"""Comparison of a network with its reference: that of `transformers`, closeness of tensors."""

import os

from torch import Tensor

from llmb.config.huggingface.hf_config import to_hf_config
from llmb.config.model import Model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def hf_network(model: Model) -> PreTrainedModel:
    """Return the network of `transformers`, by the config.json that we write."""
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(model)), attn_implementation="eager")
    if model.experts is not None:
        network.set_experts_implementation("eager")
    return network.eval()


def assert_near(actual: Tensor, expected: Tensor, label: str, tolerance: float) -> None:
    """Assert that the largest error, relative to the largest value, is below the tolerance."""
    assert actual.shape == expected.shape
    assert expected.abs().max() > 0, f"{label}: the reference is all zero, nothing is compared"
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{label}: {error:.2e}"
