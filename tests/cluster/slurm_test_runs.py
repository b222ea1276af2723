"""Real runs that tests send to a lab, and what they look at: small stand-ins of every architecture.

The fixtures `install` and `submit` of conftest.py send them.
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


def wait_for(condition, seconds: float = 240, what: str = "what was waited for"):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.1)
    return found


def ended(slurm, job: str, run: RunFolder) -> dict:
    """The result of a job that is over."""

    def over() -> bool:
        return (
            job_fields(slurm, job)["JobState"] in ENDED_STATES
        )  # there are many ways not to be: SIGNALING while a warning goes out

    wait_for(over, what=f"the end of job {job}")
    run = RunFolder.open(run.path)
    assert run.result.exists(), run.slurm_output(job).read_text()
    return read_json(run.result)


def job_fields(slurm, job: str) -> dict[str, str]:
    """What Slurm says of a job."""
    return dict(word.partition("=")[::2] for word in slurm.call("scontrol", "show", "job", job, "-o").split())


def allocated_nodes(slurm, job: str) -> tuple[int, str]:
    """How many nodes, and which, by Slurm's own word."""
    words = job_fields(slurm, job)
    return int(words["NumNodes"]), words["NodeList"]


def steps(run: RunFolder, rank: int = 0) -> list[StepDone]:
    return [event for event in read(run.events(rank)) if isinstance(event, StepDone)]


def wait_for_steps(run: RunFolder) -> None:
    wait_for(lambda: len(steps(run)) >= 2 and steps(run, 1), what="the second step")


def facts(run: RunFolder, ranks: int) -> list:
    """What must not depend on where ranks run: losses and norms of a training, answers of a served model."""
    found = []
    for rank in range(ranks):
        for event in read(run.events(rank)):
            if isinstance(event, StepDone):
                found.append((rank, event.step, event.tokens, event.loss, event.grad_norm))
            elif isinstance(event, RequestDone):
                found.append((rank, event.request, event.output_tokens, event.output_crc, event.warmup, event.error))
    return sorted(found)
