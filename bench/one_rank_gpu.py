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
from typing import Any

from measure.bench_report import BenchReport
from measure.options import build_parser, parse_options, select_rows
from training.one_rank_rows import ROWS, OneRankRow

from llmb.config.serialization import build
from llmb.config.spec import RunConfig
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.step_setup import DEFAULT_ENGINE, setup_of

COMMUNICATION = ("tp", "cp", "ep", "pp", "dp", "fsdp")
OTHER = ("bubble", "jitter", "engine")  # terms of the predictor that are no compute of a rank


def run_row(row: OneRankRow, tiny: bool, folder: str) -> tuple[RunConfig, dict[str, Any]]:
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
