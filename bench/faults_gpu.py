"""What do faults cost? Llama 1b on one GPU is broken five times on purpose, and restarts from its newest checkpoint.

    python bench/faults_gpu.py [--json FILE] [--folder FOLDER]      # about 260 s on an H200: 201 s took four faults
    python bench/faults_gpu.py --undisturbed                        # once more without faults: are all losses equal?
    python bench/faults_gpu.py --tiny                               # a small proxy on a CPU: shows only that it runs

A run of `llmb-run submit --faults`: a slow rank, an interrupted checkpoint, a killed rank, a hang, a full disk. A
checkpoint with fp32 moments has 15 GB, of which three are there at once: the folder is /dev/shm if it has room for
them, else a temporary one; with less room moments are bf16, and it says so. Printed are goodput, time to detect and to
restart and steps lost by kind, and the goodput that the model of Young and Daly expects at the interval in use and at
the best one, with the ratio of measured to expected.

`--undisturbed` trains shorter sequences without the kernels that differ between two processes (docs/goodput.md).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measure.bench_report import BenchReport

from llmb.config.serialization import build
from llmb.events import StepDone, read_all
from llmb.launch.run_folder import RunFolder
from llmb.report.goodput_text import goodput_text
from llmb.results.result import Result

FULL = ["-w", "pretrain_llama3.1", "-s", "1b", "--dtype", "bf16", "--scale", "1", "--set", "mbs=2", "--set", "gbs=2"]
TINY = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "1", "--proxy", "--seqlen", "32"]
STEPS, EVERY = 20, 10
STALL_LIMIT_S = 8  # a step takes less than a second
FAULTS = [
    {"kind": "slow_rank", "step": 3, "slow_s": 1.0, "slow_steps": 2},
    {"kind": "checkpoint_interrupted", "step": 10},
    {"kind": "hang", "step": 13},  # meanwhile the checkpoint before it is written
    {"kind": "rank_killed", "step": 16},
    {"kind": "disk_full", "step": 20},
]
REPEATABLE = [
    "--env",
    "LLMB_FORCE_FALLBACK=gemm_trial,flash_attention_4,cudnn_attention,flash_attention",
    "--seqlen",
    "2048",
]
CHECKPOINTS_GB = 48  # three with fp32 moments
SHARED_MEMORY = Path("/dev/shm")


def choose_folder(folder: Path | None) -> tuple[Path | None, bool]:
    """Return where the run folder goes (None: a temporary folder), and whether it has room for fp32 moments."""
    if folder is None and SHARED_MEMORY.is_dir() and free_gb(SHARED_MEMORY) >= CHECKPOINTS_GB:
        return SHARED_MEMORY, True
    return folder, free_gb(folder or Path("/tmp")) >= CHECKPOINTS_GB


def free_gb(folder: Path) -> float:
    return shutil.disk_usage(folder).free / 1e9


def submit(arguments: list[str], install: Path) -> tuple[Result, dict[int, set[float | None]]]:
    """Run `llmb-run submit` in an installation of its own; return the result, and all losses of each step."""
    fixed = ["--set", f"steps={STEPS}", "--set", f"window=2-{STEPS}", "--set", f"checkpoint_every={EVERY}"]
    fixed += ["--set", f"stall_limit_s={STALL_LIMIT_S}", "--on", "local", "--no-report", "--json", "--force"]
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "submit", *arguments, *fixed]
    done = subprocess.run(command, env=os.environ | {"LLMB_INSTALL": str(install)}, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        sys.exit(f"llmb-run submit failed: exit {done.returncode}")
    (run,) = RunFolder.find_all(install)
    losses: dict[int, set[float | None]] = {}
    for event in read_all(path for start in run.starts for path in start.all_events()):
        if isinstance(event, StepDone):
            losses.setdefault(event.step, set()).add(event.loss)
    return build(Result, json.loads(done.stdout.splitlines()[-1]), "result"), losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--folder", type=Path, help="of run folder and checkpoints; default: /dev/shm, or a temporary one"
    )
    parser.add_argument("--undisturbed", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    report = BenchReport(json=options.json)
    folder, has_room = choose_folder(options.folder)
    arguments = TINY if options.tiny else FULL
    if not has_room and not options.tiny:
        arguments = [*arguments, "--set", "moments=bf16"]
        print(f"less than {CHECKPOINTS_GB} GB are free in {folder or 'the temporary folder'}: moments are bf16")
    if options.undisturbed and not options.tiny:
        arguments = [*arguments, *REPEATABLE]
    with TemporaryDirectory(dir=folder) as scratch:
        plan = Path(scratch, "faults.json")
        plan.write_text(json.dumps(FAULTS))
        began = time.perf_counter()
        result, losses = submit([*arguments, "--faults", str(plan)], Path(scratch, "faulty"))
        report.print_heading(f"{result.name} on {result.gpu_name}: {result.status}, run folder in {scratch}")
        if result.goodput is None:
            print(result.reason)
            return 1
        print(goodput_text(result.goodput))
        print(f"all {time.perf_counter() - began:.0f} s; throughput {result.tokens_per_s or 0:.0f} tokens/s")
        report.record("faults", _plain(result))
        if options.undisturbed:
            _, expected = submit(arguments, Path(scratch, "undisturbed"))
            equal = sum(losses.get(step) == values for step, values in expected.items())
            print(f"steps whose loss equals that of the undisturbed run, bit for bit: {equal} of {len(expected)}")
            report.record("undisturbed", {"steps": len(expected), "equal": equal})
            return 0 if equal == len(expected) else 1
    return 0 if result.status == "ok" else 1


def _plain(result: Result) -> dict[str, Any]:
    from llmb.config.serialization import to_plain

    plain = to_plain(result)
    return {name: plain[name] for name in ("name", "gpu_name", "status", "tokens_per_s", "commit", "goodput")}


if __name__ == "__main__":
    sys.exit(main())
