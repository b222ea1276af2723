"""Explicit layers: sizes of their buffers, and models that they do not compute.

Numbers: tests/train/test_llama_layers.py, and in chunks tests/offload/test_training_equals.py.
"""

from dataclasses import replace

import pytest
import torch
from reference_training import LEAST
from small_models import llama_model

from llmb.config.model import MambaConfig
from llmb.errors import ConfigError
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.buffer_views import attn_view, kv_view, layer_weights_view, residual_view, saved_activations_view
from llmb.perfmodel.offload.buffers import ParamBuckets, buffer_bytes

MODEL = llama_model()


@pytest.mark.parametrize(
    "model",
    [MODEL, replace(MODEL, qkv_bias=True, qk_norm="head", post_norms=True), replace(MODEL, post_norms=True)],
    ids=["plain", "vectors", "post-norms"],
)
def test_buffers_are_as_large_as_the_plan_counts(model):
    plan = replace(LEAST, dtype="bf16", seqlen=37, chunk_tokens=37)
    sizes = buffer_bytes(model, plan)

    def end_of(tensors) -> int:
        """Return where the last tensor ends; each begins at a multiple of 256 bytes."""
        tensors = [tensor for tensor in tensors if tensor is not None]
        assert all(tensor.data_ptr() % 256 == buffer.data_ptr() % 256 for tensor in tensors)
        last = tensors[-1]
        end = last.data_ptr() + last.numel() * last.element_size() - buffer.data_ptr()
        return -(-end // 256) * 256

    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    for kind, views in {
        "kv": kv_view(buffer, model, 37, torch.bfloat16),
        "dkv": kv_view(buffer, model, 37, torch.float32),
        "attn": attn_view(buffer, model, 37, torch.bfloat16),
        "rest": saved_activations_view(buffer, model, 37, torch.bfloat16),
        "inp": [residual_view(buffer, model, 37, torch.bfloat16)],
    }.items():
        assert end_of(views) == sizes[kind], kind
    buffer = torch.zeros(ParamBuckets(model).bucket_numel, dtype=torch.bfloat16)
    assert end_of(layer_weights_view(buffer, model)) <= sizes["param"] == buffer.numel() * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "squared_relu"}, "activation of .* must be 'silu' or 'gelu', got 'squared_relu'"),
        ({"rope": None}, "no RoPE"),
        ({"pre_norms": False, "post_norms": True}, "pre_norms of .* must be True, got False"),
        ({"pattern": "M*", "mamba": MambaConfig(heads=1, head_dim=8, groups=1, state=8, chunk=8)}, "pattern"),
    ],
)
def test_unsupported_models_are_refused(changes, message):
    with pytest.raises(ConfigError, match=f"those of Llamas: .*{message}"):
        LlamaLayer(replace(MODEL, **changes), PlainLinears)
