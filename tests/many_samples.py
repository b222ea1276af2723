"""Run folders with many steps or requests, written as engines write them, and the cost of commands over them."""

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmb.config.overrides import from_arguments
from llmb.config.recipe import Recipe
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_json
from llmb.events import Event, RequestDone, RunEnded, RunStarted, StepDone, event_line

GIB = 2**30
TOKENS = 16  # of each request
RUN = ["-m", "llmb.cli.llmb_run"]
DERIVE = """
import sys
from llmb.cli.jobs.jobs import open_run
from llmb.cli.stored_runs import write_result
run = open_run(sys.argv[1])
write_result(run, run.read_config())
"""
SHOW = """
import sys
from llmb.cli.jobs.jobs import open_run
from llmb.cli.stored_runs import load_run
from llmb.report.summary import summary
print(summary(load_run(open_run(sys.argv[1]))[1]))
"""

# The peak that Linux reports of a process includes that of the one which started it, so a small one does.
MEASURE = """
import os, sys
discard = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
process = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ, file_actions=[discard])
_, status, used = os.wait4(process, 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def write_run(folder: Path, recipes: dict[str, Recipe], kind: str, count: int, seed: int) -> Path:
    """Write configuration and events; `kind`: steps or requests."""
    workload, dtype = {"steps": ("pretrain_llama3.1", "bf16"), "requests": ("inference_llama3.1", "fp8")}[kind]
    changes = {
        "steps": [f"steps={count}", f"window=11-{count}"],
        "requests": [f"num_requests={count}", f"osl={TOKENS}"],
    }[kind]
    request = RunRequest(size="8b", dtype=dtype, gpus=1, gpu="h200", settings=tuple(from_arguments(changes)))
    config = resolve(recipes[workload], request)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    chance = random.Random(seed)
    events = _steps(count, chance) if kind == "steps" else _requests(count, chance)
    with (folder / "events.rank0.jsonl").open("w") as lines:
        for event in (RunStarted(time=0.0, gpu_name="NVIDIA H200"), *events, RunEnded(time=1e6, status="ok")):
            lines.write(event_line(event))
    return folder


def _steps(count: int, chance: random.Random) -> Iterator[Event]:
    """Steps of half a second with AR(1) noise."""
    now, noise = 0.0, 0.0
    for n in range(1, count + 1):
        noise = 0.8 * noise + 0.6 * chance.gauss(0, 0.003)
        now += (seconds := 0.5 * math.exp(noise))
        yield StepDone(
            time=now, step=n, steps=count, seconds=seconds, busy_s=seconds - 0.001, tokens=8192, loss=4 + 8 / n,
            grad_norm=1.0 + chance.random(), memory_bytes=90 * GIB, warmup=n < 11,
        )  # fmt: skip


def _requests(count: int, chance: random.Random) -> Iterator[Event]:
    """A thousand requests a second, 20 ms to the first token, 10 ms to each one after it."""
    for n in range(count):
        first = n / 1000 + 0.02 + 0.002 * chance.random()
        times = tuple(round(first + 0.01 * k + 0.001 * chance.random() * (k > 0), 6) for k in range(TOKENS))
        yield RequestDone(
            request=n, arrival=n / 1000, first_token=times[0], token_times=times, end=times[-1], input_tokens=100,
            output_tokens=TOKENS, requested_tokens=TOKENS, finish="length",
        )  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """CPU seconds and memory of a process."""

    code: int
    cpu_s: float
    peak_gib: float


def cost_of(*arguments: str) -> Cost:
    """Run Python with these arguments; its output is discarded."""
    command = [sys.executable, "-S", "-c", MEASURE, *arguments]
    code, cpu_s, peak_kib = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return Cost(int(code), float(cpu_s), int(peak_kib) * 1024 / GIB)


def sample_costs(folder: Path, recipes: dict[str, Recipe], kind: str, count: int) -> dict[str, Cost]:
    """Write two runs with many steps or requests; return the cost of each command over them. Leaves `page.html`."""
    a, b = (str(write_run(folder / f"run{n}", recipes, kind, count, n)) for n in (1, 2))
    return {
        "derive": cost_of("-c", DERIVE, a),
        "derive the other": cost_of("-c", DERIVE, b),
        "show": cost_of("-c", SHOW, a),
        "compare": cost_of(*RUN, "compare", a, b),
        "report": cost_of(*RUN, "report", a, "-o", str(folder / "page.html")),
    }
