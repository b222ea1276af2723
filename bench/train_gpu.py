"""Training on one H200: every row beside a ceiling that was measured in the same process, its aim, and its peers.

    python bench/train_gpu.py [--json FILE] [--only rates,rows,kernels,memory,peers] [--row "8b 8k"] [--steps 20]
    python bench/train_gpu.py --only rows,kernels --row "llama 8b 8k fp8" --set recompute_layers=0
    python bench/train_gpu.py --only rows --row "llama 8b 8k"       # bf16 and every fp8 recipe of training
    python bench/train_gpu.py --tiny        # very small models on the CPU of any machine: shows only that it runs

Random weights, synthetic tokens, whole optimizer steps of the engine itself (llmb/train), in this process. A ceiling is
the sum of the best library time of each GEMM and attention call of the step and nothing else; of a Mamba scan
the bytes it must move, of experts one GEMM of all routed tokens (`train_calls.py`). It is timed before and after its
row, and the mean counts: on one chip a single one scatters by 1 to 3 %, the speed of a row by 0.6 %. Steps count that
end two seconds after the first: twenty of Llama 8b at 8,192 tokens, fewer of the others, as many as their time limit
allows. The JSON file is written after each. Peers need transformers; Liger-Kernel, torchtitan 0.2 and torchao are used
if PYTHONPATH has them.

Seconds on an H200: 410 in all. Rates 61; rows of Llama 8b 106 and 51, part `kernels` included, at 32k 18, Nemotron-H
19, Grok-1 16 and 12, DeepSeek 13 and 12, Llama 1b 10; memory 26; peers 12, 13, 18 and 23. The four rows of Qwen3 and
Gemma 2, of 14 seconds each behind their first step, come on top, and so do the three other fp8 recipes of Llama 8b, of
at most 30 seconds each. A row's ceiling is that of GEMMs with the scales of its recipe. In parts:
`--only rates,rows,kernels` and `--only peers`, which knows no speed of ours.
"""

import argparse
import sys
import time

from measure.options import build_parser, parse_options, select_rows
from training.train_rows import ROWS, without_aims

from llmb.errors import LlmbError

PARTS = ("rates", "rows", "kernels", "memory", "peers")


def run(options: argparse.Namespace) -> None:
    """Run the requested parts."""
    import torch
    from training.train_bench import Bench
    from training.train_peers import peers, start_peers
    from training.train_table import memory, rates, rows

    parts = options.parts
    bench = Bench(
        device=torch.device("cpu") if options.tiny else torch.device("cuda", 0),
        rows=tuple(without_aims(row) if options.tiny else row for row in select_rows(ROWS, options.row)),
        parts=parts,
        steps=options.steps,
        settings=tuple(options.set),
        tiny=options.tiny,
        json=options.json,
    )
    print(bench.machine, flush=True)
    bench.record("machine", bench.machine)
    if "rates" in parts:
        rates(bench)
    waiting = start_peers(bench) if "peers" in parts else []
    if parts & {"rows", "kernels"}:
        rows(bench)
    if "memory" in parts and "memory" not in bench.results:  # its row was not asked for
        memory(bench)
    if "peers" in parts:
        peers(bench, waiting)
    print(f"\n{time.perf_counter() - bench.began:.0f} seconds in all")


def main() -> None:
    parser = build_parser(__doc__, PARTS)
    parser.add_argument("--steps", type=int, help="steps of each row that count, at most")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the engine, for all rows")
    options = parse_options(parser, PARTS, ROWS)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")
    try:
        run(options)
    except LlmbError as error:  # a setting that no row takes
        sys.exit(f"train_gpu.py: {error}")


if __name__ == "__main__":
    main()
