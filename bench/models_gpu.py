"""Every architecture trains on one GPU, in bf16 and in fp8: 30 steps on a repeated batch, through `llmb-run submit`.

    python bench/models_gpu.py [--json FILE] [--steps 30] [--only llama]

Prints a line a run: what it was, its status, first and last loss (which must fall), tokens/s, TFLOP/s, MFU
and memory. It shows that they train; how fast they could be is another question.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from llmb.formats.token_file import TokenWriter
from llmb.report.table import render

# workload, size, options; sequences a step are few so that all of them end within minutes
RUNS = [
    ("pretrain_llama3.1", "1b", ["--set", "gbs=2", "--set", "lr=1e-4"]),
    ("pretrain_llama3.1", "8b", ["--set", "gbs=1", "--set", "lr=3e-5"]),
    ("pretrain_nemotronh", "8b", ["--set", "gbs=1", "--set", "lr=1e-4"]),
    ("pretrain_grok1", "314b", ["--proxy", "true-width", "--set", "gbs=1", "--seqlen", "4096", "--set", "lr=3e-5"]),
    ("pretrain_deepseek-v3", "671b", ["--proxy", "true-width", "--set", "gbs=1", "--set", "lr=3e-5"]),
]
SEQLEN = 8192


def repeated_batch(folder: Path, sequences: int) -> Path:
    """A token file as long as one step reads, so that every step reads the same."""
    path = folder / f"batch{sequences}.bin"
    state = 12345
    with TokenWriter(path, vocab=50_000, end=None) as file:
        for _ in range(sequences * SEQLEN + 1):
            state = (1103515245 * state + 12345) % 2**31
            file.add([state // 65536 % 50_000])
    return path


def run(workload: str, size: str, options: list[str], dtype: str, steps: int, data: Path) -> dict:
    """One run's Result; a run that failed tells why in it."""
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "submit", "-w", workload, "-s", size, "--dtype", dtype]
    command += ["--scale", "1", "--set", f"steps={steps}", "--set", f"data={data}", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {"status": "refused", "reason": done.stderr.strip()[-300:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = repeated_batch(Path(folder), sequences=1)
        for workload, size, extra in RUNS:
            for dtype in ("bf16", "fp8"):
                if options.only and options.only not in workload:
                    continue
                r = run(workload, size, extra, dtype, options.steps, data)
                results.append(r)
                step = (r.get("step_time_s") or {}).get("median")
                mfu = None if r.get("mfu") is None else 100 * r["mfu"]
                fell = None if r.get("loss_last") is None else r["loss_last"] < r["loss_first"]
                rows.append(
                    (workload, size, dtype, r["status"], fell, r.get("loss_first"), r.get("loss_last"), step,
                     r.get("tokens_per_s"), r.get("tflops_per_gpu"), mfu, r.get("peak_memory_gib"), r.get("proxy"))
                )  # fmt: skip
                print(render(HEADER, rows[-1:]), r.get("reason") or "", sep="\n", flush=True)
    print("\n" + render(HEADER, rows))
    if options.json:
        options.json.write_text(json.dumps(results))


HEADER = ("workload", "size", "dtype", "status", "loss fell", "first", "last", "s/step", "tokens/s", "TFLOP/s", "MFU %",
          "GiB", "proxy")  # fmt: skip


if __name__ == "__main__":
    main()
