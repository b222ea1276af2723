"""Explicit layers, in chunks and at every level of saved activations, against autograd of the plain Llama."""

from dataclasses import replace

import pytest
import torch
from reference_training import LEAST
from small_llama import MODEL, NARROW, TIED, InChunks, by_autograd

from llmb.config.spec import MambaConfig, RopeConfig
from llmb.errors import ConfigError
from llmb.models.llama_layer.layer import LlamaLayer
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.buffer_views import attn_view, kv_view, layer_weights_view, residual_view, saved_activations_view
from llmb.perfmodel.offload.buffers import ParamBuckets, buffer_bytes

SCALE = 0.05
LEVELS = {
    "all saved": lambda _layer, _chunk: "F",
    "attention saved": lambda _layer, _chunk: "A",
    "input saved": lambda _layer, _chunk: "I",
    "mixed": lambda layer, chunk: "FAI"[(layer + chunk) % 3],
}
SEQUENCE, SEVERAL, PACKED = [[20]], [[5, 5, 5, 5]], [[9, 4, 7]]


def compare(run: InChunks, groups: list[list[int]], chunk: int, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    losses, (expected_losses, expected) = run.run(groups, chunk, SCALE), by_autograd(run.model, groups, SCALE)
    torch.testing.assert_close(losses, expected_losses, rtol=rtol, atol=atol)
    actual = run.named_grads()
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            actual[name], grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("chunk", [20, 10, 7])
def test_long_sequence_in_chunks(chunk, level):
    compare(InChunks(MODEL, level=level), SEQUENCE, chunk)


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize(("groups", "chunk"), [(SEVERAL, 20), (PACKED, 20), (PACKED, 11), (PACKED, 6)])
def test_packed_documents_attend_only_to_themselves(groups, chunk, level):
    compare(InChunks(MODEL, level=level), groups, chunk)


def test_groups_accumulate_to_one_gradient():
    compare(InChunks(MODEL, level=LEVELS["mixed"]), [[20], [5, 8], [3]], 7)


@pytest.mark.parametrize("model", [TIED, NARROW, replace(MODEL, name="full heads", kv_heads=4)], ids=lambda m: m.name)
def test_other_models(model):
    compare(InChunks(model, level=LEVELS["mixed"]), [[9, 4, 7], [6]], 8)


def test_scaled_rope():
    rope = RopeConfig(scaling="llama3", factor=8.0, original_tokens=16)
    compare(InChunks(replace(MODEL, name="scaled rope", rope=rope)), SEQUENCE, 7)


def gradient_errors(run: InChunks, groups: list[list[int]], chunk: int) -> dict[str, float]:
    """Return the relative error of each gradient."""
    run.run(groups, chunk, SCALE)
    _, expected = by_autograd(run.model, groups, SCALE)
    return {
        name: float((run.named_grads()[name].float() - grad).norm() / grad.norm()) for name, grad in expected.items()
    }


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_bf16_is_as_close_as_its_rounding_allows(grad_dtype):
    groups = [[9, 4, 7], [6]]
    errors = gradient_errors(InChunks(MODEL, torch.bfloat16, grad_dtype, level=LEVELS["mixed"]), groups, 8)
    (_, exact), (_, plain) = by_autograd(MODEL, groups, SCALE), by_autograd(MODEL, groups, SCALE, torch.bfloat16)
    for name, error in errors.items():
        allowed = float((plain[name].float() - exact[name]).norm() / exact[name].norm())
        assert error < 1.25 * allowed + 1e-3, f"{name} error is {error:.4f}, by autograd in bf16 {allowed:.4f}"


@pytest.mark.parametrize(("groups", "chunk"), [([[16], [16]], 16), ([[9, 4, 7], [6]], 8)])
def test_fp8_gemms_are_as_close_as_their_rounding_allows(groups, chunk):
    model = replace(MODEL, name="fp8", layers=1)
    run = InChunks(model, torch.bfloat16, level=LEVELS["mixed"], fp8=True)
    runs = (
        gradient_errors(run, groups, chunk),
        gradient_errors(run, groups, chunk),
    )  # with current scales, with those of the first
    plain = gradient_errors(InChunks(model, torch.bfloat16), groups, chunk)
    for errors in runs:
        assert max(errors.values()) < 0.5, errors
        assert errors["layers.0.mlp.up.weight"] > 3 * plain["layers.0.mlp.up.weight"]  # it is quantized


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_recomputation_gives_the_same_bits(fp8):
    grads = []
    for level in LEVELS.values():
        run = InChunks(MODEL, torch.bfloat16, level=level, fp8=fp8)
        for _ in range(2):  # in fp8 with current scales, then with those of the first
            run.run(PACKED, 11, SCALE)
        grads.append(run.named_grads())
    for recomputed in grads[1:]:
        torch.testing.assert_close(recomputed, grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, qkv_bias=True, qk_norm="head")], ids=["plain", "vectors"])
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
        ({"activation": "gelu"}, "activation of .* must be 'silu', got 'gelu'"),
        ({"rope": None}, "no RoPE"),
        ({"attn_logit_softcap": 30.0, "logit_scale": 0.5}, "attn_logit_softcap of .* got 30.0"),
        ({"pattern": "M*", "mamba": MambaConfig(heads=1, head_dim=8, groups=1, state=8, chunk=8)}, "pattern"),
    ],
)
def test_unsupported_models_are_refused(changes, message):
    with pytest.raises(ConfigError, match=f"those of Llamas: .*{message}"):
        LlamaLayer(replace(MODEL, **changes), PlainLinears)
