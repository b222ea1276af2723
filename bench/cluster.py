"""Speed of submitting hundreds of Slurm jobs and of listing thousands of runs, with a Slurm started for it.

    python bench/cluster.py [--jobs 200] [--runs 10000] [--json FILE]        as root, with Slurm's packages installed

1. `llmb-run submit -f FILE --on slurm`, jobs a second, against bare `sbatch` in a loop       aim >= 0.8
2. `llmb-run jobs` over 10,000 stored runs, beyond the start-up of `llmb-run jobs` over none  aim < 1 s
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from desk import print_figures
from slurm_lab import SlurmLab, unavailable_reason

BIN = Path(sys.executable).parent
REPEATS = 5
WORKLOAD, SIZE, DTYPE = "pretrain_llama3.1", "8b", "fp8"
SBATCH = ["--gpus-per-node=8", "--nodes=1", "--hold", "--output=/dev/null"]
CLUSTER = """schema_version: 2
gpu_type: h100
cluster_name: lab
slurm:
  common: {hold: ''}
  gpu: {partition: main, gres: 8}
"""


def seconds(command: list[str], folder: Path, **environment: str) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    took = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-2000:]}")
    return took


def submit_rate(folder: Path, lab: SlurmLab, count: int) -> dict[str, float]:
    """Held jobs, so that both sides measure submitting and nothing else; the queue is emptied in between."""
    install = folder / "install"
    install.mkdir()
    (folder / "cluster_config.yaml").write_text(CLUSTER)
    (folder / "jobs.yaml").write_text(
        f"{WORKLOAD}_{SIZE}:\n  dtypes: [{DTYPE}]\n  scales: [8]\n  tasks:\n  - repeats: {count}\n"
    )
    script = folder / "job.sh"
    script.write_text("#!/bin/bash\n" + "# as long as a real job script\n" * 60 + "true\n")
    loop = f"for i in $(seq {count}); do sbatch --parsable {' '.join(SBATCH)} {script} || exit; done"
    submit = [str(BIN / "llmb-run"), "submit", "-f", "jobs.yaml", "--on", "slurm", "--yes"]
    bare, llmb_run = [], []
    for number in range(3):
        bare.append(seconds(["bash", "-c", loop], folder))
        _empty(lab)
        llmb_run.append(seconds(submit, folder, LLMB_INSTALL=str(install / str(number))))
        _count(lab, count)
        _empty(lab)
    figures = {"sbatch in a loop, jobs/s": count / statistics.median(bare)}
    figures["llmb-run submit, jobs/s"] = count / statistics.median(llmb_run)
    figures["llmb-run submit, x of sbatch"] = statistics.median(bare) / statistics.median(llmb_run)
    return figures


def _count(lab: SlurmLab, count: int) -> None:
    queued = len(lab.call("squeue", "-h", "-o", "%i").split())
    if queued != count:
        sys.exit(f"{count} jobs were submitted, Slurm has {queued}")


def _empty(lab: SlurmLab) -> None:
    lab.call("scancel", "--user=root")
    while lab.call("squeue", "-h", "-o", "%i").split():
        time.sleep(0.1)


def listing(folder: Path, count: int) -> dict[str, float]:
    """Runs that have ended, half of them Slurm's."""
    from llmb.config.recipe import load_all, shipped
    from llmb.config.resolve import resolve
    from llmb.config.row_selection import RunRequest
    from llmb.events import RunEnded, StepDone
    from llmb.launch.run_folder import store_path
    from llmb.results.derive import derive
    from llmb.results.job_store import Store

    recipe = load_all([shipped()])[WORKLOAD]
    config = resolve(recipe, RunRequest(size=SIZE, dtype="fp32", gpus=1, proxy="small"))
    steps = [StepDone(step=n, seconds=1.0, tokens=1000) for n in range(1, config.workload.steps + 1)]
    result = derive(config, [*steps, RunEnded(status="ok")])
    figures = {}
    for runs in (0, count):
        root = folder / f"listed{runs}"
        with Store(store_path(root)) as store, store.many():
            for number in range(runs):
                on_slurm = number % 2
                job = store.add(config, root / str(number), *(["slurm", str(number)] if on_slurm else []))
                store.finish(job, result, **({"slurm_state": "COMPLETED", "nodes": "n[1-4]"} if on_slurm else {}))
        command = [str(BIN / "llmb-run"), "jobs"]
        took = [seconds(command, folder, LLMB_INSTALL=str(root)) for _ in range(REPEATS + 1)]
        figures[f"jobs over {runs} runs, s"] = statistics.median(took[1:])
    figures["beyond start-up, s"] = figures[f"jobs over {count} runs, s"] - figures["jobs over 0 runs, s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why := unavailable_reason():
        sys.exit(f"no Slurm here: {why}")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        with SlurmLab(folder / "slurm") as lab:
            os.environ.update(lab.environment)
            figures = {"submitting": submit_rate(folder, lab, options.jobs), "job list": listing(folder, options.runs)}
    print_figures(figures, options.json)


if __name__ == "__main__":
    main()
