"""Kernels that bound the serving of Qwen3-30B-A3B on one GPU: decode attention, and fp8 experts with block scales.

    python bench/serving_kernels.py [--only attention,experts] [--rounds 7] [--json FILE]

Attention with each number of KV splits, with one tile and with two of keys and values held at a time; experts by the
persistent kernel and by the one for fewer rows. Each is compared with the reference, then all of a case are timed in
turns, each as a CUDA graph that goes through several sets of inputs, larger than any cache. The ceiling of attention
and of few rows an expert is bytes over the bandwidth measured first, of many rows torch's grouped GEMM with sorted rows
and a scale per row.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from inference.infer_rates import bandwidths
from measure.bench_report import BenchReport
from measure.device import describe_machine
from measure.device_timer import DeviceTimer, captured
from torch import Tensor

from llmb.ops.attention import paged_attention_triton
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.paged_attention import KvCache, paged_attention
from llmb.ops.moe import fused_moe_triton
from llmb.ops.moe.align_triton import AlignedBlocks, choose_block_size, moe_align_block_size
from llmb.ops.moe.expert_weights import ExpertWeights, dequantize_expert
from llmb.ops.moe.fused_moe_fp8_triton import CONFIGS
from llmb.ops.quant.activation_quant import E4M3, GROUP, GroupFp8, dequantize, quantize_activation
from llmb.perfmodel.hardware import TERA

DEVICE = torch.device("cuda", 0)
BF16, HEAD_DIM, BLOCK_TOKENS = torch.bfloat16, 128, 64
EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
REPLAYS = 3  # of a turn
PARTS = ("attention", "experts")


class AttentionCase(NamedTuple):
    """Sequences of a decode step, with lengths spread evenly."""

    name: str
    sequences: int
    heads: int
    kv_heads: int
    shortest: int
    longest: int

    def lengths(self) -> Tensor:
        spread = torch.linspace(self.shortest, self.longest, self.sequences).round().int()
        return spread[torch.randperm(self.sequences, generator=torch.Generator().manual_seed(0))]


ATTENTION = (
    AttentionCase("Qwen3-30B-A3B 1000/1000, one wave", 896, 32, 4, 1262, 1374),
    AttentionCase("Qwen3-30B-A3B 1000/1000, mixed", 896, 32, 4, 1000, 2000),
    AttentionCase("Llama 8b 1000/1000", 960, 32, 8, 1000, 2000),
    AttentionCase("Llama 8b 128/2048", 704, 32, 8, 1100, 1160),
    AttentionCase("Llama 8b 20000/2000", 82, 32, 8, 20900, 21100),
    AttentionCase("Llama 70B 1000/1000", 176, 64, 8, 1000, 2000),
    AttentionCase("Qwen3-32B 1000/1000", 352, 64, 8, 1000, 2000),
)


class DecodeOptions(NamedTuple):
    """Launch options of paged decode."""

    splits: int
    stages: int


def time_in_turns(calls: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Return median seconds of one call of each candidate; each has a call for every set of inputs."""
    replays = {name: captured(partial(_call_all, sets), DEVICE) for name, sets in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    timer = DeviceTimer(DEVICE)
    for turn in range(rounds + 1):
        for name, replay in replays.items():
            replay()  # clocks settle on this kernel
            timer.start()
            for _ in range(REPLAYS):
                replay()
            seconds = timer.stop()
            if turn:
                times[name].append(seconds / REPLAYS / len(calls[name]))
    return {name: statistics.median(spent) for name, spent in times.items()}


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def attention_inputs(case: AttentionCase, lengths: Tensor, seed: int) -> tuple[Any, ...]:
    """Return q, k, v, cache and metadata; blocks are in random order."""
    device, generator = DEVICE, torch.Generator(DEVICE).manual_seed(seed)
    counts = (lengths + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    blocks = int(counts.sum())
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(case.sequences, int(counts.max()), dtype=torch.int32)
    for row, chunk in enumerate(order.split(counts.tolist())):
        table[row, : len(chunk)] = chunk
    shape = (blocks, case.kv_heads, BLOCK_TOKENS, HEAD_DIM)
    keys, values = (torch.empty(shape, dtype=E4M3, device=device) for _ in range(2))
    for cached in (keys, values):
        for chunk in cached.split(4096):
            chunk.copy_(torch.randn(chunk.shape, device=device, dtype=BF16, generator=generator))
    width = (case.heads + 2 * case.kv_heads) * HEAD_DIM
    qkv = torch.randn(case.sequences, width, device=device, dtype=BF16, generator=generator)
    q, k, v = qkv.unflatten(1, (-1, HEAD_DIM)).split((case.heads, case.kv_heads, case.kv_heads), 1)
    metadata = AttentionMetadata(
        cu_seqlens_P1=torch.arange(case.sequences + 1, dtype=torch.int32, device=device),
        seq_lens_P=lengths.to(device), block_table_PM=table.to(device), num_decodes=case.sequences, max_query_len=1,
        max_seq_len=int(lengths.max()),
    )  # fmt: skip
    return q, k, v, KvCache(keys, values.view(blocks, case.kv_heads, HEAD_DIM, BLOCK_TOKENS)), metadata


def decode(options: DecodeOptions, inputs: tuple[Any, ...]) -> Tensor:
    """Attend with these launch options."""
    with (
        patch.object(paged_attention_triton, "decode_splits", lambda *_: options.splits),
        patch.object(paged_attention_triton, "decode_stages", lambda _: options.stages),
    ):
        return paged_attention_triton.paged_attention_triton(*inputs, HEAD_DIM**-0.5)


def small_case(case: AttentionCase) -> tuple[AttentionCase, Tensor]:
    lengths = torch.tensor([1, 63, 64, 65, 700], dtype=torch.int32)
    return case._replace(sequences=len(lengths)), lengths


def time_attention(report: BenchReport, case: AttentionCase, bandwidth: float, rounds: int) -> None:
    lengths = case.lengths()
    chosen = paged_attention_triton.decode_splits(case.sequences, case.kv_heads, int(lengths.max()), DEVICE)
    candidates = [DecodeOptions(splits, stages) for splits in (1, 2, 4) for stages in (2, 3)]
    small, small_lengths = small_case(case)
    inputs = attention_inputs(small, small_lengths, 1)
    expected = paged_attention.reference(*inputs, HEAD_DIM**-0.5)
    errors = {options: error(decode(options, inputs), expected) for options in candidates}
    sets = [attention_inputs(case, lengths, seed) for seed in range(2)]
    calls: dict[str, list[Callable[[], object]]] = {
        str(options): [partial(decode, options, inputs) for inputs in sets] for options in candidates
    }
    spent = time_in_turns(calls, rounds)
    size = 2 * HEAD_DIM * case.kv_heads * int(lengths.sum())
    rows = []
    for options, wrong in errors.items():
        seconds = spent[str(options)]
        is_chosen = options == (chosen, paged_attention_triton.decode_stages(sets[0][3]))
        rows.append((
            *options, case.sequences * case.kv_heads * options.splits, f"{wrong:.1e}", 1e6 * seconds,
            1e6 * size / bandwidth, size / bandwidth / seconds, "chosen" if is_chosen else "",
        ))  # fmt: skip
        report.record("attention", {"case": case.name, "options": options, "error": wrong, "seconds": seconds})
    titles = ("splits", "stages", "programs", "error", "us", "ceiling us", "of ceiling", "")
    report.print_table(f"decode attention, {case.name}: {case.sequences} sequences", titles, rows)


Layer = list[ExpertWeights]  # of both GEMMs


def random_layer(experts: int) -> Layer:
    weights = []
    for outputs, inputs in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        values = torch.empty(experts, outputs, inputs, dtype=E4M3, device=DEVICE)
        for expert in values:
            expert.copy_(torch.randn(outputs, inputs, device=DEVICE, dtype=BF16) * 50)
        scales = torch.rand(experts, outputs // GROUP, inputs // GROUP, device=DEVICE) * 1e-3 + 1e-4
        weights.append(ExpertWeights("1x128", values, scales))
    return weights


class Routed(NamedTuple):
    """Tokens and pairs of a step."""

    x: list[GroupFp8]
    topk_ids: Tensor
    topk_weights: Tensor
    blocks: dict[int, AlignedBlocks]


def routed_tokens(tokens: int, experts: int) -> Routed:
    ids = torch.rand(tokens, experts, device=DEVICE).topk(min(TOP_K, experts)).indices.int()
    rows = [torch.randn(count, width, device=DEVICE, dtype=BF16) for count, width in
            ((tokens, HIDDEN), (ids.numel(), WIDTH))]  # fmt: skip
    x = [quantize_activation(matrix, "1x128") for matrix in rows]
    blocks = {size: moe_align_block_size(ids, 0, experts, size) for size in (64, 128)}
    return Routed(x, ids, torch.rand(ids.shape, device=DEVICE), blocks)  # type: ignore[arg-type]


def gemm(persistent: bool, layer: Layer, routed: Routed, index: int, block_size: int) -> Tensor:
    """Compute one of both GEMMs of a layer."""
    top_k, weights = (TOP_K, None) if index == 0 else (1, routed.topk_weights)
    arguments = (layer[index], routed.blocks[block_size], routed.topk_ids.numel(), top_k, BF16, weights)
    if persistent:
        return fused_moe_triton.moe_gemm(routed.x[index], *arguments)
    with patch.object(fused_moe_triton, "fits_large_m", lambda *_: False):
        return fused_moe_triton.moe_gemm(routed.x[index], *arguments)


def gemm_error(actual: Tensor, layer: Layer, routed: Routed, index: int) -> float:
    """Return the largest error of some experts against fp32."""
    ids, top_k = routed.topk_ids.flatten(), TOP_K if index == 0 else 1
    x, worst = dequantize(routed.x[index], torch.float32), 0.0
    for expert in (0, len(layer[0].values) // 2, len(layer[0].values) - 1):
        pairs = (ids == expert).nonzero().flatten()
        expected = x[pairs // top_k] @ dequantize_expert(layer[index], expert).float().T
        if index == 1:
            expected *= routed.topk_weights.flatten()[pairs, None]
        worst = max(worst, error(actual[pairs], expected))
    return worst


def library_seconds(layer: Layer, tokens: int, rounds: int) -> list[float]:
    """Return seconds of torch's grouped GEMM with a scale per row, for each of both."""
    spent = []
    for weight in layer:
        experts, outputs, inputs = weight.values.shape
        rows = tokens * TOP_K
        x = torch.randn(rows, inputs, device=DEVICE, dtype=BF16).to(E4M3)
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=DEVICE) * (rows // experts)
        scales = torch.ones(rows, device=DEVICE), torch.ones(experts, outputs, device=DEVICE)
        call = partial(
            torch._scaled_grouped_mm, x, weight.values.transpose(1, 2), *scales, ends, out_dtype=BF16,
            use_fast_accum=True,
        )  # fmt: skip
        spent.append(time_in_turns({"library": [call]}, rounds)["library"])
    return spent


def time_experts(report: BenchReport, tokens: int, bandwidth: float, rounds: int) -> None:
    layers = [random_layer(EXPERTS) for _ in range(2)]
    routed = [routed_tokens(tokens, EXPERTS) for _ in range(2)]
    library, rows = library_seconds(layers[0], tokens, rounds), []
    block_size = choose_block_size(tokens * TOP_K, EXPERTS)
    for index, name in enumerate(("gate and up", "down")):
        kernels = {"for fewer rows": False, "persistent": True}
        errors = {
            kernel: gemm_error(gemm(persistent, layers[1], routed[1], index, block_size), layers[1], routed[1], index)
            for kernel, persistent in kernels.items()
        }
        calls: dict[str, list[Callable[[], object]]] = {
            kernel: [partial(gemm, persistent, *pair, index, block_size) for pair in zip(layers, routed, strict=True)]
            for kernel, persistent in kernels.items()
        }
        weight = layers[0][index].values
        reading = weight.numel() / bandwidth
        ceiling = max(reading, library[index]) if block_size == max(CONFIGS) else reading
        for kernel, seconds in time_in_turns(calls, rounds).items():
            rate = 2.0 * tokens * TOP_K * weight[0].numel() / seconds / TERA
            rows.append((
                name, kernel, block_size, f"{errors[kernel]:.1e}", 1e6 * seconds, rate, 1e6 * library[index],
                1e6 * ceiling, ceiling / seconds,
            ))  # fmt: skip
            report.record("experts", {"tokens": tokens, "gemm": name, "kernel": kernel, "seconds": seconds})
    titles = ("GEMM", "kernel", "rows of a block", "error", "us", "TFLOP/s", "grouped_mm us", "ceiling us",
              "of ceiling")  # fmt: skip
    report.print_table(f"experts, {tokens} tokens: {tokens * TOP_K / EXPERTS:g} rows each", titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = set(options.only.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; parts are: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device, report = DEVICE, BenchReport(json=options.json)
    print(describe_machine(device), flush=True)
    bandwidth = max(bandwidths(device, 8 << 30, 0.3).values())
    print(f"{bandwidth / TERA:.3f} TB/s", flush=True)
    if "attention" in parts:
        for case in ATTENTION:
            time_attention(report, case, bandwidth, options.rounds)
    if "experts" in parts:
        for tokens in (896, 8192):
            time_experts(report, tokens, bandwidth, options.rounds)


if __name__ == "__main__":
    main()
