"""Layers by hand, chunk by chunk and at every level of what is kept, against autograd of the plain Llama."""

from dataclasses import replace

import pytest
import torch
from small_llama import MODEL, NARROW, TIED, InChunks, by_autograd

from llmb.config.offload_plan import Plan
from llmb.config.spec import Mamba, Rope
from llmb.errors import ConfigError
from llmb.models.llama_layer.layer import Block
from llmb.models.llama_layer.linears import PlainLinears
from llmb.offload.buffer_views import attn_of, block_weights, kv_of, rest_of, stream_of
from llmb.perfmodel.offload.buffers import Units, piece_bytes

SCALE = 0.05
LEVELS = {
    "all kept": lambda _layer, _chunk: "F",
    "attention kept": lambda _layer, _chunk: "A",
    "input kept": lambda _layer, _chunk: "I",
    "mixed": lambda layer, chunk: "FAI"[(layer + chunk) % 3],
}
SEQUENCE, SEVERAL, PACKED = [[20]], [[5, 5, 5, 5]], [[9, 4, 7]]


def compare(run: InChunks, groups: list[list[int]], chunk: int, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    losses, (wanted_losses, wanted) = run.run(groups, chunk, SCALE), by_autograd(run.model, groups, SCALE)
    torch.testing.assert_close(losses, wanted_losses, rtol=rtol, atol=atol)
    found = run.named_grads()
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("chunk", [20, 10, 7])
def test_a_long_sequence_in_chunks(chunk, level):
    compare(InChunks(MODEL, level=level), SEQUENCE, chunk)


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize(("groups", "chunk"), [(SEVERAL, 20), (PACKED, 20), (PACKED, 11), (PACKED, 6)])
def test_several_documents_see_only_themselves(groups, chunk, level):
    compare(InChunks(MODEL, level=level), groups, chunk)


def test_groups_add_up_to_one_gradient():
    compare(InChunks(MODEL, level=LEVELS["mixed"]), [[20], [5, 8], [3]], 7)


@pytest.mark.parametrize("model", [TIED, NARROW, replace(MODEL, name="full heads", kv_heads=4)], ids=lambda m: m.name)
def test_other_models(model):
    compare(InChunks(model, level=LEVELS["mixed"]), [[9, 4, 7], [6]], 8)


def test_stretched_positions():
    rope = Rope(scaling="llama3", factor=8.0, original_tokens=16)
    compare(InChunks(replace(MODEL, name="stretched", rope=rope)), SEQUENCE, 7)


def away(run: InChunks, groups: list[list[int]], chunk: int) -> dict[str, float]:
    """Size of the error of each gradient relative to the gradient's."""
    run.run(groups, chunk, SCALE)
    _, wanted = by_autograd(run.model, groups, SCALE)
    return {name: float((run.named_grads()[name].float() - grad).norm() / grad.norm()) for name, grad in wanted.items()}


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_bf16_is_as_close_as_its_rounding_allows(grad_dtype):
    groups = [[9, 4, 7], [6]]
    errors = away(InChunks(MODEL, torch.bfloat16, grad_dtype, level=LEVELS["mixed"]), groups, 8)
    (_, exact), (_, plain) = by_autograd(MODEL, groups, SCALE), by_autograd(MODEL, groups, SCALE, torch.bfloat16)
    for name, error in errors.items():
        allowed = float((plain[name].float() - exact[name]).norm() / exact[name].norm())
        assert error < 1.25 * allowed + 1e-3, f"{name} is {error:.4f} away, by autograd in bf16 {allowed:.4f}"


@pytest.mark.parametrize(("groups", "chunk"), [([[16], [16]], 16), ([[9, 4, 7], [6]], 8)])
def test_fp8_products_are_as_close_as_their_rounding_allows(groups, chunk):
    model = replace(MODEL, name="rounded", layers=1)
    run = InChunks(model, torch.bfloat16, level=LEVELS["mixed"], fp8=True)
    found = away(run, groups, chunk), away(run, groups, chunk)  # with scales of their own, with those of the first
    plain = away(InChunks(model, torch.bfloat16), groups, chunk)
    for errors in found:
        assert max(errors.values()) < 0.5, errors
        assert errors["layers.0.mlp.up.weight"] > 3 * plain["layers.0.mlp.up.weight"]  # it did round


def test_with_fp8_what_was_not_kept_comes_out_the_same():
    grads = []
    for level in LEVELS.values():
        run = InChunks(MODEL, torch.bfloat16, level=level, fp8=True)
        for _ in range(2):
            run.run(PACKED, 11, SCALE)
        grads.append(run.named_grads())
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=0, atol=0)


def test_what_was_not_kept_comes_out_the_same():
    grads = []
    for level in LEVELS.values():
        run = InChunks(MODEL, torch.bfloat16, level=level)
        run.run(PACKED, 11, SCALE)
        grads.append(run.named_grads())
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=0, atol=0)


def test_pieces_are_as_large_as_the_plan_counts():
    plan = Plan(
        dtype="bf16", seqlen=37, gbs=1, chunk_tokens=37, seqs_per_group=1, groups_per_round=1, loss_tokens=37,
        update="master", update_at="forward", resident_params=0, resident_grads=0, resident_states=0, param_blocks=1,
        grad_blocks=1, state_blocks=1, inp_slots=1, kv_slots=1, attn_slots=1, rest_slots=1, levels="FF",
    )  # fmt: skip
    sizes = piece_bytes(MODEL, plan)

    def end_of(tensors) -> int:
        """Where the last tensor ends; each begins at a multiple of 256 bytes."""
        assert all(tensor.data_ptr() % 256 == buffer.data_ptr() % 256 for tensor in tensors)
        last = tensors[-1]
        end = last.data_ptr() + last.numel() * last.element_size() - buffer.data_ptr()
        return -(-end // 256) * 256

    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    for kind, found in {
        "kv": kv_of(buffer, MODEL, 37, torch.bfloat16),
        "dkv": kv_of(buffer, MODEL, 37, torch.float32),
        "attn": attn_of(buffer, MODEL, 37, torch.bfloat16),
        "rest": rest_of(buffer, MODEL, 37, torch.bfloat16),
        "inp": [stream_of(buffer, MODEL, 37, torch.bfloat16)],
    }.items():
        assert end_of(found) == sizes[kind], kind
    buffer = torch.zeros(Units(MODEL).block_numbers, dtype=torch.bfloat16)
    assert end_of(block_weights(buffer, MODEL)) <= sizes["param"] == buffer.numel() * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation": "gelu"}, "activation is 'gelu', it must be 'silu'"),
        ({"rope": None}, "no rotary positions"),
        ({"attention_cap": 30.0, "logit_scale": 0.5}, "attention_cap is 30.0"),
    ],
)
def test_models_that_are_not_computed_are_refused(changes, named):
    with pytest.raises(ConfigError, match=f"plain Llamas: .*{named}"):
        Block(replace(MODEL, **changes), PlainLinears)


def test_no_field_of_a_model_is_overlooked():
    """A model of another kind is refused by a field that says so."""
    mamba = Mamba(heads=1, head_dim=8, groups=1, state=8, chunk=8)
    with pytest.raises(ConfigError, match="pattern"):
        Block(replace(MODEL, pattern="M*", mamba=mamba), PlainLinears)
