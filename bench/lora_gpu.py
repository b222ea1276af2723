"""LoRA of a Llama 70b on one H200 with 110 GiB of host memory: each row beside its ceiling and its prediction.

    python bench/lora_gpu.py [--json FILE] [--row 110/125] [--steps 2]
    python bench/lora_gpu.py --tiny             # very small models on the CPU of any machine: shows only that it runs

Rank 16 on frozen fp8 weights, which are drawn and quantized on the device; synthetic tokens, whole optimizer steps of
16,384 tokens. Rates are measured first and plans made from them, as in `outofcore_gpu.py`. The first row has two steps
to warm up, in which kernels are chosen, the other one; two count. The ceiling is GEMMs, of adapters too, and attention
at these rates, nothing computed again: four FLOPs per frozen weight and token.

Seconds expected: rates 25, plans 10, pinning of 65 GiB (110/125) or 109 GiB (110/24) 15 to 60; weights 20 and steps of
9 to 11 each. `--row 110/125` takes about two and a half minutes, both rows under five.
"""

import argparse
import time

from measure.options import build_parser, parse_options, select_rows
from outofcore.outofcore_rows import LORA_ROWS

PARTS = ("rows",)


def run(options: argparse.Namespace) -> None:
    """Run the requested rows. Imports torch here: processes that only plan do not need it."""
    from outofcore.outofcore_bench import Bench
    from outofcore.outofcore_table import table

    rows = select_rows(LORA_ROWS, options.row)
    bench = Bench.of(options, rows)
    table(bench, bench.rates(), with_rows=True, with_batch=False)
    print(f"\n{time.perf_counter() - bench.began:.0f} seconds in all")


def main() -> None:
    parser = build_parser(__doc__, PARTS)
    parser.add_argument("--steps", type=int, default=2, help="steps of a row that count, at most")
    options = parse_options(parser, PARTS, LORA_ROWS)
    if options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")
    run(options)


if __name__ == "__main__":
    main()
