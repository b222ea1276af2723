"""fp8 linear layers of Llama 8b for a few dozen tokens: the split-K GEMM beside torch's scaled GEMM.

    python bench/split_k_gemm.py [--tokens 4,8,16,32,64,82,128] [--rounds 7] [--sweep] [--json FILE]

Each GEMM is compared with the reference, then all candidates of a case are timed in turns, each as a CUDA graph that
goes through enough copies of the weight that no cache holds them. The ceiling is the weight's bytes over the bandwidth
measured first. `--sweep` also times other tiles; a sum over the four layers says which to keep.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from inference.infer_rates import bandwidths
from measure.bench_report import BenchReport
from measure.device import describe_machine
from serving_kernels import error, time_in_turns
from torch import Tensor
from triton import next_power_of_2

from llmb.ops.gemm.split_k_gemm import SplitKWeight, split_k_gemm
from llmb.ops.gemm.split_k_gemm_triton import CONFIGS, MIN_TOKENS, SplitKConfig, split_k_gemm_triton
from llmb.ops.quant.activation_quant import PerTokenFp8, quantize_activation
from llmb.perfmodel.hardware import TERA

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROTATED_BYTES = 256 << 20  # several times the L2 cache
OTHER_CONFIGS = {
    16: (SplitKConfig(64, 256, 4, 4, 3), SplitKConfig(64, 256, 4, 5, 4), SplitKConfig(64, 128, 4, 6, 4)),
    32: (SplitKConfig(64, 256, 4, 4, 3), SplitKConfig(64, 128, 4, 6, 3), SplitKConfig(128, 128, 4, 5, 2)),
    64: (SplitKConfig(128, 128, 4, 5, 2), SplitKConfig(64, 128, 4, 6, 3), SplitKConfig(128, 128, 8, 5, 2)),
    128: (SplitKConfig(64, 128, 4, 6, 2), SplitKConfig(128, 128, 4, 5, 1), SplitKConfig(64, 256, 4, 3, 2)),
}

Set = tuple[PerTokenFp8, SplitKWeight]


def random_set(tokens: int, outputs: int, inputs: int) -> Set:
    values = (torch.randn(rows, inputs, device=DEVICE, dtype=BF16) for rows in (tokens, outputs))
    x, weight = (quantize_activation(matrix, "per_token") for matrix in values)
    assert isinstance(x, PerTokenFp8)
    assert isinstance(weight, PerTokenFp8)
    return x, SplitKWeight.of(weight.values, weight.scales[:, 0].contiguous())


def library_gemm(x: PerTokenFp8, weight: SplitKWeight) -> Tensor:
    scales = x.scales, weight.scales_O[None]
    return torch._scaled_mm(x.values, weight.values_OK.T, *scales, out_dtype=BF16, use_fast_accum=True)


def own_gemm(config: SplitKConfig, x: PerTokenFp8, weight: SplitKWeight) -> Tensor:
    return split_k_gemm_triton(x, weight, BF16, config)


def candidates_of(tokens: int, sweep: bool) -> dict[str, Callable[[PerTokenFp8, SplitKWeight], Tensor]]:
    """Return the library's GEMM first, then ours with the tiles in use, then others."""
    block_n = max(MIN_TOKENS, next_power_of_2(tokens))
    configs = (CONFIGS[block_n], *(OTHER_CONFIGS[block_n] if sweep else ()))
    return {"library": library_gemm, **{str(tuple(config)): partial(own_gemm, config) for config in configs}}


def time_layer(
    report: BenchReport, tokens: int, layer: str, bandwidth: float, rounds: int, sweep: bool
) -> dict[str, float]:
    """Compare and time all candidates of a layer; return seconds by name, the ceiling among them."""
    outputs, inputs = LAYERS[layer]
    sets = [random_set(tokens, outputs, inputs) for _ in range(-(-ROTATED_BYTES // (outputs * inputs)))]
    candidates = candidates_of(tokens, sweep)
    x, weight = sets[0]
    expected = split_k_gemm.reference(x, weight, torch.float32)
    errors = {name: error(gemm(x, weight), expected) for name, gemm in candidates.items()}
    calls = {name: [partial(gemm, *pair) for pair in sets] for name, gemm in candidates.items()}
    seconds = time_in_turns(calls, rounds)  # type: ignore[arg-type]
    report.record("gemm", {"tokens": tokens, "layer": layer, "errors": errors, "seconds": seconds})
    worst = max(errors.values())
    assert worst < 0.01, f"{layer} of {tokens} tokens: error {worst:.1e}"
    return {"ceiling": outputs * inputs / bandwidth, **seconds}


def time_tokens(report: BenchReport, tokens: int, bandwidth: float, rounds: int, sweep: bool) -> None:
    by_layer = {layer: time_layer(report, tokens, layer, bandwidth, rounds, sweep) for layer in LAYERS}
    rows = []
    for name in next(iter(by_layer.values())):
        spent = [seconds[name] for seconds in by_layer.values()]
        total, library, ceiling = (sum(s[key] for s in by_layer.values()) for key in (name, "library", "ceiling"))
        rows.append((name, *(1e6 * s for s in spent), 1e6 * total, library / total, ceiling / total))
    titles = ("us", *LAYERS, "sum", "x of library", "of ceiling")
    report.print_table(f"{tokens} tokens; tiles: outputs, inputs, warps, stages, programs", titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4,8,16,32,64,82,128")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    report = BenchReport(json=options.json)
    print(describe_machine(DEVICE), flush=True)
    bandwidth = max(bandwidths(DEVICE, 8 << 30, 0.3).values())
    print(f"{bandwidth / TERA:.3f} TB/s", flush=True)
    for tokens in map(int, options.tokens.split(",")):
        time_tokens(report, tokens, bandwidth, options.rounds, options.sweep)


if __name__ == "__main__":
    main()
