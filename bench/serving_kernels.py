"""Kernels that bound the serving of Qwen3-30B-A3B on one GPU: decode attention, and fp8 experts with block scales.

    python bench/serving_kernels.py [--only attention,experts] [--rounds 7] [--json FILE]

Each candidate is compared with the reference, then all of a case are timed in turns, each as a CUDA graph that goes
through several sets of inputs, larger than any cache. The ceiling of attention and of few rows an expert is bytes over
the bandwidth measured first, of many rows torch's grouped GEMM with sorted rows and a scale per row.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import before_fp8
import before_paged
import torch
import triton
from bench_report import BenchReport
from device import describe_machine
from infer_rates import bandwidths
from torch import Tensor

from llmb.ops.attention import paged_attention_triton
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.balanced_decode_triton import balanced_decode_triton
from llmb.ops.attention.paged_attention import KvCache, paged_attention
from llmb.ops.device_capabilities import capabilities
from llmb.ops.moe import fused_moe_fp8_triton, fused_moe_triton
from llmb.ops.moe.align_triton import AlignedBlocks, moe_align_block_size
from llmb.ops.moe.expert_weights import ExpertWeights, dequantize_expert
from llmb.ops.moe.fused_moe_fp8_triton import PersistentConfig
from llmb.ops.quant.activation_quant import E4M3, GROUP, Activation, GroupFp8, dequantize, quantize_activation

DEVICE = torch.device("cuda", 0)
BF16, HEAD_DIM, BLOCK_TOKENS = torch.bfloat16, 128, 64
EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
WORKERS = 12


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
    """Launch options of paged decode; none: before."""

    splits: int
    warps: int
    stages: int
    balanced: int = 0  # programs of a multiprocessor that share all blocks evenly; 0: a program for each KV head
    maxnreg: int | None = None


DECODES: tuple[DecodeOptions | None, ...] = (
    None,
    *(
        DecodeOptions(*x)
        for x in (
            (1, 2, 3),
            (2, 4, 3),
            (4, 4, 3),
            (1, 2, 3, 4),
            (1, 2, 3, 5, 200),
            (1, 2, 3, 5),
            (1, 4, 3, 3),
            (1, 2, 4, 4),
        )
    ),
)


class GemmOptions(NamedTuple):
    """Kernel of both GEMMs of a layer's experts; none: before."""

    block_size: int
    config: PersistentConfig | None = None
    fused: bool = False  # activation in the first GEMM


FEW_ROWS = (
    GemmOptions(64),
    GemmOptions(64, PersistentConfig(1, False, 4, 4, 2)),
    GemmOptions(64, PersistentConfig(2, True, 8, 4), fused=True),
    GemmOptions(64, PersistentConfig(2, False, 8, 4)),
    GemmOptions(64, PersistentConfig(2, False, 8, 5)),
    GemmOptions(64, PersistentConfig(2, False, 8, 4), fused=True),
    GemmOptions(64, PersistentConfig(2, False, 8, 4, 1, 1)),
    GemmOptions(64, PersistentConfig(2, False, 8, 3), fused=True),
)
MANY_ROWS = (
    GemmOptions(128),
    GemmOptions(128, PersistentConfig(2, True, 8, 3)),
    GemmOptions(128, PersistentConfig(2, True, 8, 3), fused=True),
)


# ---- timing


def time_in_turns(calls: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Return median seconds of one call of each candidate; each has a call for every set of inputs."""
    graphs = {}
    for name, sets in calls.items():
        for call in sets:
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in sets:
                call()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            graph.replay()  # clocks settle on this kernel
            start.record()
            for _ in range(3):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end) / 3000 / len(calls[name]))
    return {name: statistics.median(spent) for name, spent in times.items()}


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


# ---- attention


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


def decode(options: DecodeOptions | None, inputs: tuple[Any, ...]) -> Tensor:
    """Attend with these launch options."""
    if options is None:
        return before_paged.paged_attention_triton(*inputs, HEAD_DIM**-0.5)
    if options.balanced:
        q, _, _, cache, metadata = inputs
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        balanced_decode_triton(
            q, cache, metadata, HEAD_DIM**-0.5, None, None, None, out, options.balanced * capabilities(q.device).sms,
            options.warps, options.stages, options.maxnreg,
        )  # fmt: skip
        return out
    with ExitStack() as stack:
        settings = {"STAGES": options.stages, "WARPS": options.warps, "SPLIT_WARPS": options.warps}
        for name, value in settings.items():
            stack.enter_context(patch.object(paged_attention_triton, name, value))
        stack.enter_context(patch.object(paged_attention_triton, "num_kv_splits", lambda *_: options.splits))
        return paged_attention_triton.paged_attention_triton(*inputs, HEAD_DIM**-0.5)


def small_case(case: AttentionCase) -> tuple[AttentionCase, Tensor]:
    lengths = torch.tensor([1, 63, 64, 65, 700], dtype=torch.int32)
    return case._replace(sequences=len(lengths)), lengths


def decode_candidates(case: AttentionCase) -> list[DecodeOptions | None]:
    """Long sequences of few requests have splits, others one or two."""
    most = 4 if case.sequences < 100 else 2 if case.sequences < 400 else 1
    return [options for options in DECODES if options is None or options.splits <= most]


def time_attention(report: BenchReport, case: AttentionCase, bandwidth: float, rounds: int) -> None:
    small, lengths = small_case(case)
    inputs = attention_inputs(small, lengths, 1)
    expected = paged_attention.reference(*inputs, HEAD_DIM**-0.5)
    errors = {}
    for options in decode_candidates(case):
        try:
            errors[options] = error(decode(options, inputs), expected)
        except Exception as problem:
            print(f"{options}: {problem}"[:200], flush=True)
    lengths = case.lengths()
    sets = [attention_inputs(case, lengths, seed) for seed in range(2)]
    before = decode(None, sets[1])
    calls = {}
    for options in errors:
        errors[options] = max(errors[options], error(decode(options, sets[1]), before))
        calls[str(options)] = [partial(decode, options, inputs) for inputs in sets]
    spent = time_in_turns(calls, rounds)
    size = 2 * HEAD_DIM * case.kv_heads * int(lengths.sum())
    programs = case.sequences * case.kv_heads
    chosen = before_paged.num_kv_splits(
        case.sequences, case.kv_heads, int(lengths.max()), before_paged.MAX_PROGRAMS, before_paged.MIN_SPLIT_TOKENS,
        before_paged.MAX_SPLITS,
    )  # fmt: skip
    rows = []
    for options, wrong in errors.items():
        seconds = spent[str(options)]
        splits = options.splits if options else chosen
        rows.append((
            "before" if options is None else "new", splits, "-" if options is None else options.warps,
            "-" if options is None else options.stages, "-" if options is None else options.maxnreg,
            f"{options.balanced} a SM" if options and options.balanced else programs * splits, f"{wrong:.1e}", 1e6 * seconds,
            1e6 * size / bandwidth, size / bandwidth / seconds, spent["None"] / seconds,
        ))  # fmt: skip
        report.record("attention", {"case": case.name, "options": options, "error": wrong, "seconds": seconds})
    titles = (
        "kernel",
        "splits",
        "warps",
        "stages",
        "maxnreg",
        "programs",
        "error",
        "us",
        "ceiling us",
        "of ceiling",
        "before / new",
    )
    report.print_table(f"decode attention, {case.name}: {case.sequences} sequences", titles, rows)


# ---- experts


class Layer(NamedTuple):
    """Weights of both GEMMs."""

    weights: list[ExpertWeights]


def random_layer(experts: int) -> Layer:
    weights = []
    for outputs, inputs in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        values = torch.empty(experts, outputs, inputs, dtype=E4M3, device=DEVICE)
        for expert in values:
            expert.copy_(torch.randn(outputs, inputs, device=DEVICE, dtype=BF16) * 50)
        scales = torch.rand(experts, outputs // GROUP, inputs // GROUP, device=DEVICE) * 1e-3 + 1e-4
        weights.append(ExpertWeights("1x128", values, scales))
    return Layer(weights)


def gemm(
    options: GemmOptions, layer: Layer, index: int, x: GroupFp8, blocks: AlignedBlocks, pairs: int,
    routed: Tensor | None,
) -> Tensor | GroupFp8:  # fmt: skip
    """Compute one of both GEMMs of a layer."""
    weight, top_k = layer.weights[index], TOP_K if index == 0 else 1
    if options.config is None:
        if options.block_size == before_fp8.BLOCK_M:
            return before_fp8.large_m_gemm(x, weight, blocks, pairs, top_k, BF16, routed)
        with patch.object(fused_moe_triton, "fits_large_m", lambda *_: False):
            return fused_moe_triton.moe_gemm(x, weight, blocks, pairs, top_k, BF16, routed)
    tables = {"CONFIGS": {options.block_size: options.config}, "GATED_CONFIGS": {options.block_size: options.config}}
    with patch.multiple(fused_moe_fp8_triton, **tables):
        if options.fused and index == 0:
            return fused_moe_fp8_triton.gated_gemm(x, weight, blocks, pairs, top_k, BF16, "silu")
        return fused_moe_fp8_triton.large_m_gemm(x, weight, blocks, pairs, top_k, BF16, routed)


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


def both(options: GemmOptions, layer: Layer, routed: Routed, index: int) -> Activation:
    """Compute the first GEMM with its activation, or the second one."""
    weights = routed.topk_weights if index == 1 else None
    out = gemm(
        options, layer, index, routed.x[index], routed.blocks[options.block_size], routed.topk_ids.numel(), weights
    )
    if index == 0 and isinstance(out, Tensor):
        out = fused_moe_triton.moe_gated_act(out, routed.topk_ids, 0, len(layer.weights[0].values), "silu", "1x128")
    return out


def gemm_error(options: GemmOptions, layer: Layer, routed: Routed, index: int, before: Tensor) -> float:
    """Return the larger error: of some experts against fp32, of all pairs against the kernel before."""
    actual = dequantize(both(options, layer, routed, index), BF16)
    ids, top_k = routed.topk_ids.flatten(), TOP_K if index == 0 else 1
    x = dequantize(routed.x[index], torch.float32)
    worst = error(actual, before)
    for expert in (0, 77, EXPERTS - 1):
        pairs = (ids == expert).nonzero().flatten()
        expected = x[pairs // top_k] @ dequantize_expert(layer.weights[index], expert).float().T
        if index == 0:
            gate, up = expected.chunk(2, -1)
            expected = torch.nn.functional.silu(gate) * up
        else:
            expected *= routed.topk_weights.flatten()[pairs, None]
        worst = max(worst, error(actual[pairs], expected))
    return worst


def library_seconds(layer: Layer, tokens: int, rounds: int) -> list[float]:
    """Return seconds of torch's grouped GEMM with a scale per row, for each of both."""
    spent = []
    for weight in layer.weights:
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


def time_experts(
    report: BenchReport, tokens: int, candidates: tuple[GemmOptions, ...], bandwidth: float, rounds: int
) -> None:
    layers = [random_layer(EXPERTS) for _ in range(2)]
    routed = [routed_tokens(tokens, EXPERTS) for _ in range(2)]
    library = library_seconds(layers[0], tokens, rounds)
    rows, total = [], [0.0] * len(candidates)
    for index, name in enumerate(("gate, up, activation", "down")):
        working = []
        for options in candidates:
            try:
                both(options, layers[1], routed[1], index)
                working.append(options)
            except Exception as problem:
                print(f"{options}: {problem}"[:200], flush=True)
        candidates = tuple(working)
        before = dequantize(both(candidates[0], layers[1], routed[1], index), BF16)
        errors = [gemm_error(options, layers[1], routed[1], index, before) for options in candidates]
        print(name, [f"{wrong:.1e}" for wrong in errors], flush=True)
        calls: dict[str, list[Callable[[], object]]] = {
            str(options): [partial(both, options, *pair, index) for pair in zip(layers, routed, strict=True)]
            for options in candidates
        }
        spent = time_in_turns(calls, rounds)
        weight = layers[0].weights[index].values
        flops = 2.0 * tokens * TOP_K * weight[0].numel()
        reading = weight.numel() / bandwidth
        ceiling = max(reading, library[index]) if tokens > 2048 else reading
        for number, (options, wrong) in enumerate(zip(candidates, errors, strict=True)):
            seconds = spent[str(options)]
            total[number] += seconds
            config = options.config
            rows.append((
                name, options.block_size, *(config or ["-"] * 6), options.fused, f"{wrong:.1e}",
                1e6 * seconds, flops / seconds / 1e12, 1e6 * ceiling, ceiling / seconds,
                spent[str(candidates[0])] / seconds,
            ))  # fmt: skip
            report.record("experts", {"tokens": tokens, "gemm": name, "options": options, "seconds": seconds})
    titles = ("GEMM", "rows", "blocks_n", "in turn", "warps", "stages", "programs", "group_m", "fused", "error", "us",
              "TFLOP/s", "ceiling us", "of ceiling", "before / new")  # fmt: skip
    report.print_table(
        f"experts, {tokens} tokens: {tokens * TOP_K / EXPERTS:g} rows each", titles, rows,
        f"both GEMMs, us, in that order: {', '.join(f'{1e6 * seconds:.0f}' for seconds in total)}",
        f"torch's grouped GEMM, us: {', '.join(f'{1e6 * seconds:.0f}' for seconds in library)}",
    )  # fmt: skip


# ---- compilation ahead, by several processes into Triton's cache


def warm_up(worker: int) -> None:
    """Compile every so-manieth candidate on tiny inputs."""
    tasks: list[Callable[[], object]] = []
    for options in dict.fromkeys((*FEW_ROWS, *MANY_ROWS)):
        for index in range(2):
            tasks.append(partial(both, options, LazyLayer(), LazyTokens(), index))
    seen = set()
    for case in ATTENTION:
        for options in decode_candidates(case):
            small, lengths = small_case(case)
            if options is not None and options.balanced:
                lengths = torch.ones(case.sequences, dtype=torch.int32)
                small = case
            padded = triton.next_power_of_2(len(lengths))
            for count in {padded, 8}:
                key = (case.heads, case.kv_heads, options, count)
                if options is not None and key not in seen:
                    seen.add(key)
                    sized = small._replace(sequences=min(count, len(lengths)))
                    tasks.append(partial(warm_decode, options, sized, lengths[: sized.sequences]))
    launch = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> object:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    triton.JITFunction.run = compile_only
    for task in tasks[worker::WORKERS]:
        try:
            task()
        except Exception as problem:  # the main process meets it, too
            print(f"not compiled: {problem}"[:200], flush=True)


def warm_decode(options: DecodeOptions | None, small: AttentionCase, lengths: Tensor) -> None:
    if options is not None:
        decode(options, attention_inputs(small, lengths, 1))


class LazyLayer:
    """Weights of eight experts, allocated when a worker needs them."""

    def __getattr__(self, name: str) -> Any:
        layer = random_layer(TOP_K)
        self.weights = layer.weights
        return getattr(layer, name)


class LazyTokens:
    """Tokens of such a layer."""

    def __getattr__(self, name: str) -> Any:
        routed = routed_tokens(32, TOP_K)
        self.x, self.topk_ids, self.topk_weights, self.blocks = routed
        return getattr(routed, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="attention,experts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    device, report = DEVICE, BenchReport(json=options.json)
    print(describe_machine(device), flush=True)
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(warm_up, range(WORKERS), chunksize=1)
    bandwidth = max(bandwidths(device, 8 << 30, 0.3).values())
    print(f"compiled in {time.perf_counter() - began:.0f} s; {bandwidth / 1e12:.3f} TB/s", flush=True)
    if "attention" in options.only:
        for case in ATTENTION:
            time_attention(report, case, bandwidth, options.rounds)
    if "experts" in options.only:
        for tokens, candidates in ((896, FEW_ROWS), (8192, MANY_ROWS)):
            time_experts(report, tokens, candidates, bandwidth, options.rounds)


if __name__ == "__main__":
    main()
