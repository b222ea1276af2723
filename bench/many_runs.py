"""What do very many runs, steps or requests cost? CPU seconds and memory of commands over them. No GPU.

    python bench/many_runs.py [--runs 10000] [--samples 1000000] [--json FILE]
    python bench/many_runs.py --runs 10 --samples 100      # shows only that it runs

`jobs rebuild` over finished local runs of 40 steps each, with the job store lost and with links of an older one; and
derive, show, compare and report of a run with a million steps, and of one with a million requests. The aims: 8 s for
10,000 folders; 30 s and 1 GiB for each of the others.
"""

import argparse
import os
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from measure.bench_report import BenchReport

from llmb.cli.stored_runs import write_result
from llmb.config.recipe import Recipe, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from many_samples import cost_of, sample_costs


def write_runs(root: Path, recipes: dict[str, Recipe], count: int) -> None:
    """Write the folders of finished runs, as `llmb-run submit` leaves them."""
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    template = RunFolder.create(root / "template", config, datetime.now())
    started = RunStarted(time=0.0, world_size=1, gpu_name="cpu", host="node1", versions={"torch": "2.11.0"})
    steps = [StepDone(time=float(n), step=n, seconds=0.5, tokens=512, loss=9.0 / n) for n in range(1, 41)]
    for event in (started, *steps, RunEnded(time=50.0, status="ok")):
        append(template.events(0), event)
    write_result(template, config)
    for number in range(1, count + 1):
        run = RunFolder.create(root, config, datetime.now())
        for name in (template.events(0).name, template.result.name):
            (run.path / name).write_bytes((template.path / name).read_bytes())
        run.log.write_text("step 1\n" * 40)
        run.write_record(config, f"L{number}")
        run.add_short_path(f"L{number}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    options = parser.parse_args()
    recipes, report, rows = load_all([shipped()]), BenchReport(json=options.json), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        costs = {}
        if options.runs:
            write_runs(root / "install", recipes, options.runs)
            os.environ["LLMB_INSTALL"] = str(root / "install")
            costs[f"jobs rebuild of {options.runs:,} runs"] = cost_of("-m", "llmb.cli.llmb_run", "jobs", "rebuild")
        for kind in ("steps", "requests") if options.samples else ():
            for command, cost in sample_costs(root / kind, recipes, kind, options.samples).items():
                costs[f"{command} of {options.samples:,} {kind}"] = cost
    for command, cost in costs.items():
        assert cost.code == 0, command
        report.record(command, {"cpu_s": cost.cpu_s, "peak_gib": cost.peak_gib})
        rows.append((command, f"{cost.cpu_s:.1f}", "8" if "rebuild" in command else "30", f"{cost.peak_gib:.2f}"))
    title = f"Many runs and samples; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    report.print_table(title, ("command", "CPU s", "at most", "peak GiB"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
