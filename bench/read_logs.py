"""How long does a log of another engine take to read? Logs of several shapes, each read by `llmb-run read`. No GPU.

    python bench/read_logs.py [--gib 0.5] [--folder /tmp] [--json FILE]
    python bench/read_logs.py --gib 0.001      # shows only that it runs

chatter: Megatron-Bridge, a step line now and then among the messages of all ranks, as logs of gigabytes are.
trace:   the same with a trace of NCCL's collectives.
steps:   chatter with as many steps as 5 GiB of it hold a million.
unknown: chatter without any step, which is searched for failures.

CPU seconds of the process and its children, scaled to 5 GiB; the aim is 60 s. `grep -c` on the same file is the floor.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure.bench_report import BenchReport

AIM_GIB, AIM_S = 5, 60.0
STEP = (
    " [2025-12-19 10:49:15] iteration {:8d}/ 9000000 | consumed samples: {:12d}"
    " | elapsed time per iteration (ms): 5812.3 | learning rate: 3.000000E-05 | global batch size:    64"
    " | lm loss: 1.238000E+01 | loss scale: 1.0"
    " | grad norm: 9.975 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
CHATTER = (
    "[rank{rank}]:W1219 10:48:55.{n:06d} {pid} torch/_logging/_internal.py:1089] [0/0] Profiler is not initialized\n",
    "{rank}: /opt/megatron-lm/megatron/core/models/gpt/gpt_layer_specs.py:{n}: UserWarning: The fp8 argument is"
    " deprecated and will be removed soon.\n",
    "{rank}:   warnings.warn(\n",
    "node{node:03d}:{pid}:{pid} [{gpu}] transformer_engine: recipe DelayedScaling margin=0 amax_history_len=1024\n",
    "INFO:megatron.core.optimizer:Setting up optimizer with config OptimizerConfig(lr=3e-05, weight_decay={n})\n",
    "[{rank}] DEBUG:urllib3.connectionpool:https://huggingface.co:443 HEAD /resolve/config.json HTTP/1.1 200 {n}\n",
)
TRACE = (
    "node{node:03d}:{pid}:{pid} [{gpu}] NCCL INFO AllReduce: opCount {n:x} sendbuff 0x7f{n:010x} recvbuff 0x7f{n:010x} "
    "count 33554432 datatype 9 op 0 root 0 comm 0x55556b100660 [nranks=8] stream 0x5555630c58b0\n",
)


def lines_of(shape: str) -> Iterator[str]:
    """Yield the lines of an endless log."""
    chance, step = random.Random(1), 0
    templates = CHATTER + TRACE * 20 if shape == "trace" else CHATTER
    while True:
        if shape != "unknown":
            step += 1
            yield STEP.format(step, 64 * step)
        for _ in range(40 if shape == "steps" else 2000):
            rank = chance.randrange(1024)
            values = {
                "rank": rank,
                "node": rank // 8,
                "gpu": rank % 8,
                "pid": 4000 + rank,
                "n": chance.randrange(10**6),
            }
            yield chance.choice(templates).format(**values)


def write_log(path: Path, shape: str, size: int) -> None:
    """Write a log of a shape: 64 MB of it, repeated, as the shape and not the content costs time; steps are all new."""
    distinct = size if shape == "steps" else min(size, 64 << 20)
    lines = lines_of(shape)
    with path.open("w+b") as log:
        while log.tell() < distinct:
            log.write(next(lines).encode())
        length = log.tell()
        log.seek(0)
        block = log.read() if length < size else b""
        while block and log.tell() < size:
            log.write(block)


def cpu_seconds(command: list[str]) -> tuple[float, float, float]:
    """Return CPU seconds, wall seconds and the peak memory in MB of a command."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE
    ) as process:  # grep stops at a match if it writes to /dev/null
        assert process.stdout is not None
        process.stdout.read()
        _, process.returncode, usage = os.wait4(process.pid, 0)
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began, usage.ru_maxrss / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--shapes", default="chatter,trace,steps,unknown")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    report, rows = BenchReport(json=options.json), []
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / "log-pretrain.out"
            write_log(path, shape, int(options.gib * 2**30))
            scale = AIM_GIB * 2**30 / path.stat().st_size
            grep, _, _ = cpu_seconds(["grep", "-c", "elapsed time per iteration", str(path)])
            cpu, wall, peak_mb = cpu_seconds([sys.executable, "-m", "llmb.cli.llmb_run", "read", str(path)])
        figures = {"grep_s": grep, "cpu_s": cpu, "wall_s": wall, "peak_mb": peak_mb, "bytes": options.gib * 2**30}
        report.record(shape, figures)
        rows.append(
            (
                shape,
                f"{scale * grep:.1f}",
                f"{scale * cpu:.1f}",
                f"{scale * wall:.1f}",
                f"{AIM_S:.0f}",
                f"{peak_mb:.0f}",
            )
        )
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    title = f"Logs of {options.gib:g} GiB, seconds scaled to {AIM_GIB} GiB; {machine}"
    report.print_table(title, ("log", "grep", "CPU s", "wall s", "at most", "peak MB"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
