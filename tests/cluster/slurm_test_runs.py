"""Real runs that tests submit to a lab, small proxies of every architecture, and helpers to inspect them.

The fixtures `install` and `submit` of conftest.py submit them.
"""

import time

from llmb.config.serialization import read_json
from llmb.events import RequestDone, StepDone, read
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.job_states import ENDED_STATES

HOSTILE = 'it\'s "a" $HOME `b` %j 100%\nline'
CLUSTER = """
schema_version: 2
cluster_name: lab
gpu_type: cpu
environment: {GPUS_PER_NODE: "1", OMP_NUM_THREADS: "1", SITE_SAYS: "a 'b' $c"}
slurm: {common: {partition: main}, gpu: {}, cpu: {}}
"""
SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
TINY = [f"--set=model.{field}={value}" for field, value in SHAPE.items()]
LLAMA = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--proxy", *TINY, "--seqlen", "32"]
GROK = ["-w", "pretrain_grok1", "-s", "314b", "--dtype", "fp32", "--proxy", "--seqlen", "32", "--set=model.layers=2"]
NEMOTRON = ["-w", "pretrain_nemotronh", "-s", "56b", "--dtype", "fp32", "--proxy", "--seqlen", "64"]
DEEPSEEK = ["-w", "inference_deepseek-r1", "-s", "671b", "--dtype", "bf16", "--proxy"]
LONG = [*LLAMA, "--scale", "2", "--set", "steps=100000"]


def wait_for(condition, seconds: float = 240, event: str = "the condition"):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{event} did not happen in {seconds} s"
        time.sleep(0.1)
    return value


def wait_for_result(slurm, job: str, run: RunFolder) -> dict:
    """Wait for the end of a job and return its result."""

    def has_ended() -> bool:
        state = job_fields(slurm, job)["JobState"]
        return state in ENDED_STATES  # there are many other states: SIGNALING while a warning is sent

    wait_for(has_ended, event=f"the end of job {job}")
    run = RunFolder.open(run.path)
    assert run.result.exists(), run.slurm_output(job).read_text()
    return read_json(run.result)


def job_fields(slurm, job: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`."""
    return dict(word.partition("=")[::2] for word in slurm.call("scontrol", "show", "job", job, "-o").split())


def allocated_nodes(slurm, job: str) -> tuple[int, str]:
    """Return the number of nodes of a job and their names."""
    fields = job_fields(slurm, job)
    return int(fields["NumNodes"]), fields["NodeList"]


def steps(run: RunFolder, rank: int = 0) -> list[StepDone]:
    return [event for event in read(run.events(rank)) if isinstance(event, StepDone)]


def wait_for_steps(run: RunFolder) -> None:
    """Wait for the second step of rank 0 and the first of rank 1."""
    wait_for(lambda: len(steps(run)) >= 2 and steps(run, 1), event="the second step")


def computed_values(run: RunFolder, ranks: int) -> list:
    """Return values that must not depend on where ranks run: losses and gradient norms, or served outputs."""
    values = []
    for rank in range(ranks):
        for event in read(run.events(rank)):
            if isinstance(event, StepDone):
                values.append((rank, event.step, event.tokens, event.loss, event.grad_norm))
            elif isinstance(event, RequestDone):
                values.append((rank, event.request, event.output_tokens, event.output_crc, event.warmup, event.error))
    return sorted(values)
