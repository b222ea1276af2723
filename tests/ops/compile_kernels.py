"""Compile every kernel that real shapes launch, for a family of GPUs that need not be here.

    python tests/ops/compile_kernels.py 89                        # compute capability 8.9: RTX 4090, L40S, L4
    python tests/ops/compile_kernels.py 89 --only softcap --each
    python tests/ops/compile_kernels.py 90 --list                 # launches only, to compare two versions of the code

Shapes are those of whole models that train and serve (`bench/training/train_rows.py`, `bench/inference/model_rows.py`),
of a few layers at full width, and of the full-size cases of ops. Prints a line for each kernel with the most that one
of its specializations needs, with --each a line for each of them: bytes of shared memory, registers, spilled bytes.
Then what failed: a compiler's error, or too much shared memory. Exit code 1 if anything did.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from kernel_matrix.gpu_families import FAMILIES, GpuFamily, pretend_gpu

if TYPE_CHECKING:
    from kernel_matrix.kernel_figures import KernelFigures
    from kernel_matrix.launch_recorder import Launch

COLUMNS = ("shared_bytes", "registers", "spilled_bytes")
_launches: "list[Launch]" = []  # inherited by the processes that compile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=int, choices=FAMILIES, help="compute capability, without its dot")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name, or whose step, contains this")
    parser.add_argument("--most", type=int, metavar="N", help="so many launches of a kernel, spread over all of them")
    parser.add_argument("--cases", metavar="PATTERN", help="no models, and full-size cases of ops with such an id only")
    parser.add_argument("--each", action="store_true", help="a line for each specialization")
    parser.add_argument("--list", action="store_true", help="print the launches, compile nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    family = FAMILIES[options.target]
    pretend_gpu(family)
    from kernel_matrix.real_launches import record_launches

    recorded = record_launches(family, options.cases)
    launches = [launch for launch in recorded.launches if options.only in f"{launch.kernel} {launch.step}"]
    _launches.extend(launches if options.most is None else spread(launches, options.most))
    if options.list:
        print(*sorted({launch.title for launch in _launches}), sep="\n")
        return 0
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        figures = list(pool.map(partial(_figures, family.target), range(len(_launches)), chunksize=8))
    results = list(zip(_launches, figures, strict=True))
    print_results(family, results, options.each)
    for line in recorded.refused:
        print(f"refused: {line}")
    failures = [(launch, failure) for launch, each in results if (failure := each.failure(family.shared_bytes))]
    for launch, failure in failures:
        print(f"FAILED {launch.title}\n    {launch.step}: {failure}")
    print(f"{family.name}: {len(results)} launches of {len({launch.kernel for launch in _launches})} kernels, ", end="")
    print(f"{len(failures)} of them fail")
    if options.json:
        plain = [{**launch.plain, **asdict(each)} for launch, each in results]
        options.json.write_text(json.dumps(plain, indent=1))
    return 1 if failures else 0


def spread(launches: "list[Launch]", most: int) -> "list[Launch]":
    """Return at most so many launches of each kernel, from the first one to the last."""
    by_kernel: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        by_kernel[launch.kernel].append(launch)
    chosen = []
    for of_kernel in by_kernel.values():
        count = min(most, len(of_kernel))
        chosen += [of_kernel[index * (len(of_kernel) - 1) // max(1, count - 1)] for index in range(count)]
    return chosen


def _figures(target: int, index: int) -> "KernelFigures":
    from kernel_matrix.kernel_figures import compiled_figures

    return compiled_figures(_launches[index], target)


def print_results(family: GpuFamily, results: "list[tuple[Launch, KernelFigures]]", each: bool) -> None:
    """Print the figures of each kernel, or of each specialization."""
    print(f"{family.gpus}: compute capability {family.name}, {family.shared_bytes} bytes of shared memory for a block")
    print(*(f"{column:>13}" for column in COLUMNS), " launches  kernel")
    by_kernel: dict[str, list[KernelFigures]] = defaultdict(list)
    for launch, figures in results:
        by_kernel[launch.title if each else launch.kernel].append(figures)
    for kernel, compiled in sorted(by_kernel.items()):
        most = (_most(getattr(figures, column) for figures in compiled) for column in COLUMNS)
        print(*(f"{'-' if value is None else value:>13}" for value in most), f"{len(compiled):>9}  {kernel}")


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


if __name__ == "__main__":
    sys.exit(main())
