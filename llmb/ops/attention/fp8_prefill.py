"""Prefill attention in fp8 by cuDNN, through the package nvidia-cudnn-frontend: torch's attention has no fp8.

    fp8_prefill(qkv_NW, batch, cache, scale, out_NHD)           # `batch` whole prompts of one length, causal

Keys and values are rounded as the cache holds them, queries to e4m3 without a scale, probabilities in steps of e4m3
between 0 and 1. cuDNN gives the output in e4m3 too, here scaled by the largest value: no output exceeds it, as each is
a mean of values. On an H200 with 32 heads and 8 KV heads of 128, 20,000 tokens: 3.7 ms, 890 TFLOP/s; cuDNN in bf16
5.4 ms. The output differs by 3.4 % of its norm from that of bf16 with the same rounded inputs.

A plan is built for each shape, in up to a second. So lengths are padded to eight sizes of an octave, and only long
prompts come here.

Shapes: N tokens, B prompts, S tokens of one with padding, H query heads, G KV heads, D head_dim, W = (H + 2 G) D.
"""

import importlib
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import E4M3, MIN_AMAX

MIN_TOKENS = 2048  # of a prompt that is worth a plan
OUTPUT_MAX = 400.0  # what the largest value becomes in e4m3, whose largest is 448: rounded probabilities may exceed 1
PROBABILITY_SCALE = 256.0
_ALIGNMENT = 4  # floats that keep a scalar apart from the next: 16 bytes
_Q, _K, _V, _OUT, _SCALARS, _AMAX, _TOKENS = 1, 2, 3, 4, 5, 20, 30  # first ids of tensors of a graph


def fp8_prefill(qkv_NW: Tensor, batch: int, cache: KvCache, scale: float, out_NHD: Tensor) -> None:
    """Write the causal attention of `batch` whole prompts of one length to `out_NHD`, which is contiguous."""
    tokens, width, head_dim = len(qkv_NW) // batch, qkv_NW.shape[1], cache.head_dim
    heads = width // head_dim - 2 * cache.kv_heads
    padded = padded_tokens(tokens)
    qkv_BSW, amax_1 = quantize_qkv(qkv_NW, batch, padded, cache.kv_heads, head_dim, cache.key_scale, cache.value_scale)
    out_BSX = torch.empty(batch, padded, heads * head_dim, dtype=E4M3, device=qkv_NW.device)
    graph = _graph(batch, padded, heads, cache.kv_heads, head_dim, scale, qkv_NW.device)
    _execute(graph, qkv_BSW, out_BSX, amax_1, tokens, heads, cache)
    dequantize_output(out_BSX, amax_1, tokens, out_NHD)


def padded_tokens(tokens: int) -> int:
    """Return the next of eight lengths of an octave."""
    step = 1 << max(tokens.bit_length() - 4, 0)
    return -(-tokens // step) * step


@op
def quantize_qkv(
    qkv_NW: Tensor, batch: int, padded: int, kv_heads: int, head_dim: int, key_scale: float, value_scale: float
) -> tuple[Tensor, Tensor]:
    """Return q, k and v in e4m3, [B, S, W] with zeros as padding, and the largest magnitude of v."""
    kv_width, width = kv_heads * head_dim, qkv_NW.shape[1]
    q, k, v = qkv_NW.float().split([width - 2 * kv_width, kv_width, kv_width], dim=1)
    rows_NW = torch.cat((q, k * (1 / key_scale), v * (1 / value_scale)), dim=1).to(E4M3)
    out_BSW = torch.zeros(batch, padded, width, dtype=E4M3, device=qkv_NW.device)
    out_BSW[:, : len(qkv_NW) // batch] = rows_NW.unflatten(0, (batch, -1))
    return out_BSW, v.abs().amax().clamp(min=MIN_AMAX).reshape(1)


@op
def dequantize_output(out_BSX: Tensor, amax_1: Tensor, tokens: int, out_NHD: Tensor) -> None:
    """Write the output without padding and without its scale to `out_NHD`, which is contiguous."""
    out_NHD.copy_((out_BSX[:, :tokens].float() * (amax_1 * (1 / OUTPUT_MAX))).reshape(out_NHD.shape))


def _execute(
    graph: Any, qkv_BSW: Tensor, out_BSX: Tensor, amax_1: Tensor, tokens: int, heads: int, cache: KvCache
) -> None:
    cudnn, device = _cudnn(), qkv_BSW.device
    handle = _handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    q, value_bytes = qkv_BSW.data_ptr(), cache.head_dim
    scalars, lengths = _scalars(cache.key_scale, cache.value_scale, device), _lengths(len(qkv_BSW), tokens, device)
    out_scale_1 = OUTPUT_MAX / amax_1
    scratch = torch.empty(2, _ALIGNMENT, device=device)  # cuDNN's own amax of probabilities and output
    pointers = {
        _Q: q, _K: q + heads * value_bytes, _V: q + (heads + cache.kv_heads) * value_bytes, _OUT: out_BSX.data_ptr(),
        **{_SCALARS + i: scalars[i].data_ptr() for i in range(len(scalars))},
        _SCALARS + len(scalars): out_scale_1.data_ptr(),
        _AMAX: scratch[0].data_ptr(), _AMAX + 1: scratch[1].data_ptr(),
        _TOKENS: lengths.data_ptr(), _TOKENS + 1: lengths.data_ptr(),
    }  # fmt: skip
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
    graph.execute(pointers, workspace.data_ptr(), handle=handle)


@lru_cache(maxsize=64)
def _graph(
    batch: int, padded: int, heads: int, kv_heads: int, head_dim: int, scale: float, device: torch.device
) -> Any:
    """Build cuDNN's plan for a shape."""
    cudnn = _cudnn()
    fp8, fp32, int32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=_handle(device))
    width = (heads + 2 * kv_heads) * head_dim

    def rows(uid: int, count: int) -> Any:
        strides = (padded * width, head_dim, width, 1)
        return graph.tensor(uid=uid, dim=(batch, count, padded, head_dim), stride=strides, data_type=fp8)

    def scalar(uid: int) -> Any:
        return graph.tensor(uid=uid, dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=fp32)

    def lengths(uid: int) -> Any:
        return graph.tensor(uid=uid, dim=(batch, 1, 1, 1), stride=(1, 1, 1, 1), data_type=int32)

    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    out, _, *amaxes = graph.sdpa_fp8(
        q=rows(_Q, heads), k=rows(_K, kv_heads), v=rows(_V, kv_heads), attn_scale=scale, generate_stats=False,
        use_causal_mask=True, use_padding_mask=True, seq_len_q=lengths(_TOKENS), seq_len_kv=lengths(_TOKENS + 1),
        **{name: scalar(_SCALARS + i) for i, name in enumerate(names)},
    )  # fmt: skip
    out_strides = (padded * heads * head_dim, head_dim, heads * head_dim, 1)
    out.set_uid(_OUT).set_output(True).set_dim((batch, heads, padded, head_dim)).set_stride(out_strides)
    out.set_data_type(fp8)
    for uid, amax in enumerate(amaxes, start=_AMAX):
        amax.set_uid(uid).set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph


@cache
def _cudnn() -> Any:
    return importlib.import_module("cudnn")


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return _cudnn().create_handle()


@cache
def _scalars(key_scale: float, value_scale: float, device: torch.device) -> Tensor:
    """Return the scales that are the same in every call, each on its own 16 bytes."""
    values = (1.0, key_scale, value_scale, 1 / PROBABILITY_SCALE, PROBABILITY_SCALE)
    return torch.tensor(values).unsqueeze(1).repeat(1, _ALIGNMENT).to(device)


@lru_cache(maxsize=64)
def _lengths(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.full((batch,), tokens, dtype=torch.int32, device=device)
