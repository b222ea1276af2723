"""Speed of the command line, each figure as a ratio to a baseline of the same run.

    python bench/desk.py [--log-gib 1.0] [--json FILE]

1. start-up of `llmb-run --help` and `llmb-run list` against `python -c pass`          aim <= 6
   `import llmb`, what it adds to `python -c pass`                                      aim < 60 ms
2. a communication log of 1 GiB summarised, against `grep -c` on the same file          aim <= 4, memory < 200 MB
3. `llmb-run jobs` over 1,000 runs against 10 runs                                      aim < 1.5 x + 1 s
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
REPEATS = 15
# Byte code is cached for both sides, as it is for every installed program.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str], repeats: int = REPEATS, **environment: str) -> float:
    """Median wall time of a command after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        # Into a pipe: grep stops at the first match when it writes to /dev/null.
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**ENVIRONMENT, **environment})
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def start_up(install: str) -> dict:
    bare = seconds([sys.executable, "-c", "pass"])
    results = {"python -c pass, ms": 1e3 * bare}
    for arguments in (["--help"], ["list"], ["submit", "--help"]):
        took = seconds([str(BIN / "llmb-run"), *arguments], LLMB_INSTALL=install)
        results[f"llmb-run {' '.join(arguments)}, ms"] = 1e3 * took
        results[f"llmb-run {' '.join(arguments)}, x of pass"] = took / bare
    results["import llmb, ms more than pass"] = 1e3 * (seconds([sys.executable, "-c", "import llmb"]) - bare)
    return results


def write_log(path: Path, size: int) -> None:
    """A log as a traced 8-GPU job writes it: a few communicators and streams, buffers that the allocator uses again,
    a training line now and then."""
    chance = random.Random(1)
    shapes = [("AllReduce", 1, 7, 8), ("AllGather", 33554432, 9, 8), ("ReduceScatter", 33554432, 9, 8),
              ("Broadcast", 4096, 4, 64), ("AllReduce", 524288, 9, 4), ("Send", 16777216, 9, 2)]  # fmt: skip
    pointers = [[chance.randrange(2**46, 2**47) for _ in range(64)] for _ in range(8)]
    lines = []
    for number in range(200_000):
        rank, kind = number % 8, number % len(shapes)
        operation, count, datatype, ranks = shapes[kind]
        buffer, comm, stream = chance.choice(pointers[rank]), pointers[rank][kind], pointers[rank][63]
        lines.append(
            f"node001:{4000 + rank}:{5000 + rank} [{rank}] NCCL INFO {operation}: opCount {number:x} "
            f"sendbuff 0x{buffer:x} recvbuff 0x{buffer + count:x} count {count} "
            f"datatype {datatype} op 0 root 0 comm 0x{comm:x} [nranks={ranks}] stream 0x{stream:x}\n"
        )
        if number % 500 == 0:
            step = number // 500 + 1
            lines.append(
                f" [2025-12-19 10:49:15] iteration {step:8d}/     400 | elapsed time per iteration (ms): 9.1 |\n"
            )
    block = "".join(lines).encode()
    with path.open("wb") as log:
        while log.tell() < size:
            log.write(block[: size - log.tell()])


def communication_log(folder: Path, gib: float) -> dict:
    path = folder / "nccl.log"
    write_log(path, int(gib * 2**30))
    seconds(["cat", str(path)], repeats=1)  # both sides read from the page cache
    grep = seconds(["grep", "-c", "NCCL INFO", str(path)], repeats=3)
    took, peak_mb = [], []
    for _ in range(3):
        code = (
            "import re, sys, time, resource\nfrom pathlib import Path\n"
            "from llmb.results.readers.nccl_log import summarize\n"
            "t = time.perf_counter(); table = summarize(Path(sys.argv[1])); took = time.perf_counter() - t\n"
            # VmHWM is this program's own peak; getrusage's would hold that of the process which started it.
            "own = int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
            "peak = own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
            "print(took, peak / 1e3, len(table), sum(r.calls for r in table))"
        )
        out = subprocess.check_output([sys.executable, "-c", code, str(path)], text=True, env=ENVIRONMENT).split()
        took.append(float(out[0]))
        peak_mb.append(float(out[1]))
    mine = statistics.median(took)
    return {
        "log, GiB": gib, "grep -c, s": grep, "llmb, s": mine, "llmb, x of grep": mine / grep,
        "peak memory and largest child's, MB": max(peak_mb), "rows": int(out[2]), "calls": int(out[3]),
    }  # fmt: skip


def job_lists(folder: Path) -> dict:
    """Stores of 10 and 1,000 finished runs, listed by the command."""
    from llmb.config.recipe import load_all, shipped
    from llmb.config.resolve import resolve
    from llmb.config.row_selection import RunRequest
    from llmb.events import RunEnded, StepDone
    from llmb.launch.run_folder import store_path
    from llmb.results.derive import derive
    from llmb.results.job_store import Store

    recipe = load_all([shipped()])["pretrain_llama3.1"]
    config = resolve(recipe, RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    steps = [StepDone(step=n, seconds=1.0, tokens=1000) for n in range(1, config.workload.steps + 1)]
    result = derive(config, [*steps, RunEnded(status="ok")])
    results = {}
    for count in (10, 1000):
        root = folder / f"install{count}"
        with Store(store_path(root)) as store:
            for number in range(count):
                store.finish(store.add(config, root / str(number)), result)
        results[f"jobs over {count} runs, s"] = seconds([str(BIN / "llmb-run"), "jobs"], LLMB_INSTALL=str(root))
    results["1,000 runs, x of 10 runs"] = results["jobs over 1000 runs, s"] / results["jobs over 10 runs, s"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log-gib", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        results = {
            "start-up": start_up(str(folder)),
            "communication log": communication_log(folder, options.log_gib),
            "job list": job_lists(folder),
        }
    print_figures(results, options.json)


def print_figures(results: dict[str, dict[str, float]], file: Path | None) -> None:
    """Print the figures of each part, and write them to a file if one is given."""
    for title, figures in results.items():
        print(title)
        for figure, value in figures.items():
            print(f"  {figure:32} {value:12.4g}")
    if file:
        file.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
