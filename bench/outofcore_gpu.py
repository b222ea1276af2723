"""Out-of-core training on one H200: every row beside its published figure, its ceiling, its prediction and its peers.

    python bench/outofcore_gpu.py [--json FILE] [--only rates,rows,batch,peer] [--row 8192/60/24] [--steps 2]
    python bench/outofcore_gpu.py --row 8192/75/78 --only rows --profile FOLDER
    python bench/outofcore_gpu.py --tiny        # very small models on the CPU of any machine: shows only that it runs

Random weights, synthetic tokens, whole optimizer steps. Rates are measured first and plans made from them, so that
ceiling and prediction are of this very machine. Host memory is locked once, as much as the largest plan takes. A row
has one step to warm up, the first row two, and two that count, or as many as 30 seconds hold. The JSON file is written
after each.

Seconds expected: rates 25, plans 8, locking 108 GiB 15 to 60; rows of 8,192 tokens 42 each, of 65,536 tokens 56 each,
that of 262,144 tokens 145 (alone 285); `batch` 115 beside its row; peers of 65,536 tokens 45 and 80, of 8,192 tokens 45
and 75. About 17 minutes for everything. In parts: `--row 8192/` takes 10 minutes, `--only rows --row 8192/110/` 5,
`--only rows,peer --row 65536/,262144/` 9, `--only rows --row 65536/,262144/` 7, `--only peer` 4.
"""

import argparse
import os
import time
from pathlib import Path

from measure.options import build_parser, parse_options, select_rows
from outofcore.outofcore_rows import ROWS

PARTS = ("rates", "rows", "batch", "peer")


def run(options: argparse.Namespace) -> None:
    """Run the requested parts. Imports torch here: processes that only plan do not need it."""
    from outofcore.outofcore_bench import Bench
    from outofcore.outofcore_peers import peers
    from outofcore.outofcore_table import table

    parts, rows = options.parts, select_rows(ROWS, options.row)
    bench = Bench.of(options, rows, None if options.profile is None else Path(options.profile) / "profile")
    if parts - {"peer"}:
        rates = bench.rates()
        if parts & {"rows", "batch"}:
            table(bench, rates, "rows" in parts, "batch" in parts)
    if "peer" in parts:  # the locked memory has been given back by now: they need it
        peers(bench, {row.title for row in rows})
    print(f"\n{time.perf_counter() - bench.began:.0f} seconds in all")


def main() -> None:
    parser = build_parser(__doc__, PARTS)
    parser.add_argument("--steps", type=int, default=2, help="steps of a row that count, at most")
    parser.add_argument(
        "--profile", type=Path, nargs="?", const=os.environ.get("OUT", ""), metavar="FOLDER",
        help="profile the first row; the pictures go to FOLDER/profile, without FOLDER to $OUT/profile",
    )  # fmt: skip
    options = parse_options(parser, PARTS, ROWS)
    if options.profile == "":
        parser.error("--profile needs a FOLDER where OUT is not set in the environment")
    if options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")
    run(options)


if __name__ == "__main__":
    main()
