"""How far is our engine from published step times? One rank of each published layout on one GPU, `--one-rank`.

    python bench/one_rank_gpu.py [--row "70b fsdp"] [--json FILE]      # 5 minutes on an H200 for all rows
    python bench/one_rank_gpu.py --tiny         # small proxies of the same layouts, on a CPU: shows only that it runs

Each row runs as `llmb-run submit ... --one-rank` does: the micro-batches of one rank of H100s are measured here; its
communication and the pipeline bubble are modelled. The sum stands beside the published step time of all ranks. What
explains their ratio: each part minus the same part of the predicted step of the engine that was published
(`llmb-run predict`), in seconds. A published engine hides most of tp behind GEMMs; ours waits for it.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from measure.bench_report import BenchReport
from measure.options import build_parser, parse_options, select_rows

from llmb.config.serialization import build
from llmb.config.spec import RunConfig
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_setup import DEFAULT_ENGINE, setup_of

LLAMA, NEMOTRON, GROK = "pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1"
STEPS = ("--set", "steps=2", "--set", "window=2-2")  # a step has 24 to 128 micro-batches; the first warms up
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp", "fsdp")
OTHER = ("bubble", "jitter", "engine")  # terms of the predictor that are no compute of a rank
NVIDIA = "NVIDIA dgxc-benchmarking"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank of a published layout on H100s."""

    title: str
    workload: str
    size: str
    scale: int
    published_s: float
    source: str
    dtype: str = "fp8"
    settings: tuple[str, ...] = ()
    tiny_scale: int = 8

    def command(self, tiny: bool) -> list[str]:
        """Return the command line of the run."""
        select = ["-w", self.workload, "-s", self.size, "--dtype", self.dtype]
        settings = [option for setting in self.settings for option in ("--set", setting)]
        where = ["--scale", str(self.scale), "--gpu-type", "h100", *settings]
        if tiny:  # the layout scaled down; of a row with its own layout fsdp; graphs need a GPU
            fsdp = ["--set", "fsdp=true", "--set", "tp=1", "--set", "pp=1", "--set", "vp=none"]
            layout = fsdp if self.settings == FSDP else ()
            where = ["--scale", str(self.tiny_scale), "--gpu-type", "h100", "--proxy", *layout]
        return [sys.executable, "-m", "llmb.cli.llmb_run", "submit", *select, *where, *STEPS, "--one-rank"]


GRAPHS = ("cuda_graphs=true",)  # its many narrow kernels are launched one by one otherwise: 15 s instead of 13
FSDP = ("fsdp=true", "tp=1", "pp=1", "vp=none", "mbs=2", "gbs=256", "recompute_layers=60")  # 53 is the least that fits
ROWS = (
    Row(title="Nemotron-H 56b fp8 tp8", workload=NEMOTRON, size="56b", scale=32, settings=GRAPHS,
        published_s=15.119, source=f"{NVIDIA} nemotronh v25.05"),
    Row(title="Llama 70b fp8 tp4 pp8", workload=LLAMA, size="70b", scale=64, tiny_scale=16,
        published_s=9.86, source=f"{NVIDIA} llama3.1 v25.04"),
    Row(title="Llama 70b fp8 fsdp", workload=LLAMA, size="70b", scale=128, settings=FSDP,
        published_s=9.074, source=f"{NVIDIA} maxtext v25.02, another engine"),
    Row(title="Llama 405b fp8 tp8 pp8 cp2", workload=LLAMA, size="405b", scale=1024, tiny_scale=16,
        published_s=12.42, source=f"{NVIDIA} llama3.1 v25.04"),
    Row(title="Grok-1 fp8 tp4 pp8 cp2 ep8", workload=GROK, size="314b", scale=512, tiny_scale=16,
        published_s=13.433, source=f"{NVIDIA} grok1 v25.05.02"),
    Row(title="Grok-1 bf16 tp4 pp8 cp2 ep8", workload=GROK, size="314b", scale=512, dtype="bf16", tiny_scale=16,
        published_s=15.933, source=f"{NVIDIA} grok1 v25.05.02"),
)  # fmt: skip


def run_row(row: Row, tiny: bool, folder: str) -> tuple[RunConfig, dict[str, Any]]:
    """Run one row and return its configuration and its stored result; the log of a failure goes to the screen."""
    command, environment = row.command(tiny), {**os.environ, "LLMB_INSTALL": folder}
    resolved = subprocess.run([*command, "--dry-run", "--json"], env=environment, capture_output=True, text=True)
    done = subprocess.run(
        [*command, "--on", "local", "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode or resolved.returncode:
        raise SystemExit(f"{row.title} failed: {' '.join(command)}\n{resolved.stderr}\n{done.stderr}")
    config = build(RunConfig, json.loads(resolved.stdout.splitlines()[-1]), "config")
    return config, json.loads(done.stdout.splitlines()[-1])


def explain(config: RunConfig, step: dict[str, Any]) -> dict[str, float]:
    """Return each part of the step minus the same part of the predicted step of the published engine, in seconds."""
    terms = predict(setup_of(config, engine=DEFAULT_ENGINE)).terms
    communication = sum(terms[kind] for kind in COMMUNICATION)
    compute = sum(terms.values()) - communication - sum(terms[name] for name in OTHER)
    return {
        "compute": step["measured_s"] - compute,
        "communication": sum(step["communication_s"].values()) - communication,
        "bubble": step["bubble_s"] - terms["bubble"],
    }


HEADER = (
    "one rank on this GPU", "rank", "measured s", "TFLOP/s", "communication s", "bubble s", "sum s", "published s",
    "published/sum", "compute", "communication", "bubble",
)  # fmt: skip


def main() -> int:
    parser = build_parser(__doc__, ("steps",))
    options = parse_options(parser, ("steps",), ROWS)
    report, lines = BenchReport(json=options.json), []
    for row in select_rows(ROWS, options.row):
        with tempfile.TemporaryDirectory() as folder:
            config, result = run_row(row, options.tiny, folder)
        step, published = result["one_rank"], None if options.tiny else row.published_s
        difference = explain(config, step)
        ratio = None if published is None else published / step["step_time_s"]
        facts = {"row": row.title, "published_s": published, "source": row.source, "ratio": ratio}
        report.record(
            "one_rank", {**facts, "difference_s": difference, "memory_gib": result["peak_memory_gib"], **step}
        )
        seconds = (step["measured_s"], step["tflops"], sum(step["communication_s"].values()), step["bubble_s"])
        cells = [f"{value:.3g}" for value in (*seconds, step["step_time_s"])]
        cells += ["-" if value is None else f"{value:.3f}" for value in (published, ratio)]
        cells += [f"{value:+.2f}" for value in difference.values()]
        lines.append((row.title, f"{step['rank']} of {step['ranks']}", *cells))
        print("  ".join(lines[-1]), flush=True)
    notes = "the last three columns: seconds more than predicted for the published engine on H100s"
    report.print_table("One rank of published layouts, measured compute and modelled rest", HEADER, lines, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
