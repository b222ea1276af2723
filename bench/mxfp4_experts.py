"""Routed experts of gpt-oss on one GPU: MXFP4 weights widened in the kernel, or before it, and torch's grouped GEMM.

    python bench/mxfp4_experts.py [--tokens 1024,8192] [--tiles] [--blocks] [--seconds 0.2] [--json FILE]

A call routes random tokens evenly and computes both GEMMs, biases, activation and the weighted sum. The ceiling is two
calls of torch's grouped_mm with bf16 weights and rows that are sorted already, without anything between them. With
--tiles the GEMM that widens in the kernel is also timed with other tiles, and with --blocks nothing but it, with pairs
in blocks of each size: random routing gives half of the experts more pairs than the mean.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from measure.bench_report import BenchReport
from measure.device import describe_machine
from measure.device_timer import time_sustained

from llmb.ops.moe import fused_moe_fp4_triton, fused_moe_triton
from llmb.ops.moe.align_triton import MoEGemmConfig
from llmb.ops.moe.expert_weights import ExpertWeights
from llmb.ops.moe.fused_moe import Routing
from llmb.perfmodel.hardware import TERA

HIDDEN = WIDTH = 2880
TOP_K = 4
EXPERTS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
BF16, NEVER = torch.bfloat16, 1 << 30
TILES = (
    *((128, 64, 8, 3, 8, None), (128, 64, 8, 3, 8, 128), (128, 64, 8, 4, 8, 128)),
    *((64, 64, 4, 4, 8, None), (64, 128, 4, 3, 8, None), (256, 64, 8, 3, 8, None)),
)


class Layer(NamedTuple):
    """Random weights of one layer."""

    gate_up: ExpertWeights
    down: ExpertWeights


def random_layer(experts: int, device: torch.device) -> Layer:
    """Return packed weights with scales around one hundredth."""

    def weights(outputs: int, inputs: int) -> ExpertWeights:
        packed = torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8, device=device)
        return ExpertWeights("mxfp4", packed, scales, bias=torch.zeros(experts, outputs, dtype=BF16, device=device))

    return Layer(weights(2 * WIDTH, HIDDEN), weights(HIDDEN, WIDTH))


def time_fused_moe(layer: Layer, tokens: int, widen_pairs: int, seconds: float) -> float:
    """Return the seconds of a call whose weights are widened first from so many pairs of an expert on."""
    experts, device = len(layer.down.values), layer.down.values.device
    x_NC = torch.randn(tokens, HIDDEN, device=device, dtype=BF16)
    topk_ids_NK = torch.rand(tokens, experts, device=device).topk(TOP_K).indices
    routing = Routing(torch.full((tokens, TOP_K), 0.25, device=device), topk_ids_NK, experts)
    before, fused_moe_fp4_triton.WIDEN_PAIRS = fused_moe_fp4_triton.WIDEN_PAIRS, widen_pairs
    try:
        return time_sustained(
            partial(fused_moe_triton.fused_moe_triton, x_NC, routing, *layer, "swigluoai", BF16), device, seconds
        )
    finally:
        fused_moe_fp4_triton.WIDEN_PAIRS = before


def time_grouped_mm(layer: Layer, tokens: int, seconds: float) -> float:
    """Return the seconds of both GEMMs by torch, with widened weights."""
    experts, device = len(layer.down.values), layer.down.values.device
    matrices = [fused_moe_fp4_triton.widen(weights, BF16).values.transpose(1, 2) for weights in layer]
    rows = [torch.randn(tokens * TOP_K, matrix.shape[1], device=device, dtype=BF16) for matrix in matrices]
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * (tokens * TOP_K // experts)

    def both() -> None:
        for x_MI, matrix_EIO in zip(rows, matrices, strict=True):
            F.grouped_mm(x_MI, matrix_EIO, offs=ends)

    return time_sustained(both, device, seconds)


def time_tiles(report: BenchReport, layer: Layer, tokens: int, seconds: float) -> None:
    """Time the GEMM that widens in the kernel with other tiles."""
    configs, rows = fused_moe_fp4_triton.CONFIGS, []
    before = dict(configs)
    for tiles in TILES:
        configs.update({block: MoEGemmConfig(*tiles) for block in configs})
        spent = time_fused_moe(layer, tokens, NEVER, seconds)
        rows.append((*tiles, 1e6 * spent))
        report.record("tiles", {"tokens": tokens, "tiles": tiles, "seconds": spent})
    configs.update(before)
    titles = ("outputs", "inputs", "warps", "stages", "group_m", "registers", "us")
    report.print_table(f"{tokens} tokens, widened in the kernel, other tiles", titles, rows)


def time_blocks(report: BenchReport, name: str, layer: Layer, tokens: Sequence[int], seconds: float) -> None:
    """Time the GEMM that widens in the kernel with pairs in blocks of each size."""
    chosen, sizes, rows = fused_moe_triton.choose_block_size, sorted(fused_moe_fp4_triton.CONFIGS), []
    for count in tokens:
        spent = []
        for size in sizes:
            with patch.object(fused_moe_triton, "choose_block_size", return_value=size):
                spent.append(time_fused_moe(layer, count, NEVER, seconds))
        pairs, experts = count * TOP_K, len(layer.down.values)
        rows.append((count, pairs / experts, *(1e6 * x for x in spent), chosen(pairs, experts)))
        report.record("blocks", {"model": name, "tokens": count, "seconds": dict(zip(sizes, spent, strict=True))})
    titles = ("tokens", "pairs of an expert", *(f"{size} us" for size in sizes), "chosen")
    report.print_table(f"{name}: pairs in blocks of each size", titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    parser.add_argument("--blocks", action="store_true", help="time blocks of each size, nothing else")
    parser.add_argument("--seconds", type=float, default=0.2, help="minimum time of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device, report = torch.device("cuda", 0), BenchReport(json=options.json)
    print(describe_machine(device), flush=True)
    for name, experts in EXPERTS.items():
        layer, rows = random_layer(experts, device), []
        if options.blocks:
            time_blocks(report, name, layer, [*map(int, options.tokens.split(","))], options.seconds)
            continue
        for tokens in map(int, options.tokens.split(",")):
            tflop = 6 * tokens * TOP_K * HIDDEN * WIDTH / TERA
            inside, before = (time_fused_moe(layer, tokens, pairs, options.seconds) for pairs in (NEVER, 0))
            ceiling = time_grouped_mm(layer, tokens, options.seconds)
            rates = [tflop / spent for spent in (inside, before, ceiling)]
            pairs = tokens * TOP_K // experts
            rows.append(
                (tokens, pairs, 1e6 * inside, rates[0], 1e6 * before, rates[1], rates[2], max(rates[:2]) / rates[2])
            )
            report.record("experts", {"model": name, "tokens": tokens, "in_kernel_s": inside, "before_s": before,
                                      "grouped_mm_s": ceiling})  # fmt: skip
        titles = ("tokens", "pairs of an expert", "in the kernel us", "TFLOP/s", "before it us", "TFLOP/s",
                  "grouped_mm TFLOP/s", "best / grouped_mm")  # fmt: skip
        report.print_table(f"{name}: {experts} experts, top {TOP_K}", titles, rows)
        if options.tiles:
            for tokens in map(int, options.tokens.split(",")):
                time_tiles(report, layer, tokens, options.seconds)


if __name__ == "__main__":
    main()
