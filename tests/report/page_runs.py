"""Finished runs for pages: events as engines write them, with hostile names and an error that holds a token."""

from dataclasses import replace
from math import exp, sin

from llmb.cli.explain.run_figures import explain_result
from llmb.config.overrides import from_arguments
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import GpuSample, RequestDone, RunEnded, RunStarted, ServingFacts, ServingSample, StepDone, TimeSpent
from llmb.perfmodel.explain.run_prediction import predict_run
from llmb.report.page.run_record import RunRecord
from llmb.results.derive import derive
from llmb.results.result import Caution

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u2028"
KINDS = {"matrix products": 0.6, "attention": 0.2, "memory-bound work": 0.1, "communication": 0.05, "idle": 0.05}


def _started(rank=0):
    return RunStarted(time=0.0, rank=rank, gpu_name="NVIDIA H200", host="n1", versions={"torch": "2.13.0"})


def _record(config, events, label, **fields):
    result = derive(config, events)
    return RunRecord(
        label=label, config=config, result=result, events=events, explanation=explain_result(config, result),
        command="llmb-run submit -w w", **fields,
    )  # fmt: skip


def gpu_samples(rank, seconds, measured=None):
    """Samples of a GPU that is power-capped every other second."""
    state = {"rank": rank, "measured": measured, "temperature_c": 60.0, "power_limit_w": 700.0, "read_s": 0.0005}
    return [
        GpuSample(
            time=n / 2, power_w=690.0 + n % 5, sm_clock_mhz=1980.0 - 225 * (n % 4 > 1),
            throttle_reasons=("power cap",) if n % 4 > 1 else (), **state,
        )
        for n in range(int(2 * seconds))
    ]  # fmt: skip


def trained(recipes, steps=40, ranks=1, profiled=False, label="L1", **changes):
    """Llama 8B on an H200, a step of 4.2 s with one outlier."""
    settings = tuple(from_arguments([f"steps={steps}", f"window=3-{steps}", "gbs=6", "mbs=2"]))
    request = RunRequest(size="8b", dtype="bf16", gpus=1, gpu="h200", settings=settings)
    config = resolve(recipes["pretrain_llama3.1"], request)
    config = replace(config, predicted=predict_run(config), **changes)
    tokens = config.workload.gbs * config.workload.seqlen
    events = [_started(rank) for rank in range(ranks)]
    for rank in range(ranks):
        for n in range(1, steps + 1):
            seconds = (8.4 if n == steps // 2 else 4.2) + 0.02 * sin(n) + 0.1 * rank
            events.append(
                StepDone(
                    step=n, steps=steps, rank=rank, seconds=seconds, busy_s=seconds - 0.1, tokens=tokens, time=4.2 * n,
                    loss=4 + 8 * exp(-n / 10), grad_norm=1.0 + 1 / n, memory_bytes=90 * 2**30, warmup=n < 3,
                )
            )  # fmt: skip
        events += gpu_samples(rank, 4.2 * min(steps, 200))
    if profiled:
        events += [TimeSpent(kind=kind, seconds_per_step=4.3 * share, share=share) for kind, share in KINDS.items()]
    return _record(config, [*events, RunEnded(time=1e6, status="ok")], label)


def served(recipes, requests=64, tokens=20, label="L2"):
    """Llama 8B served on an H200, with long TTFTs at the start."""
    settings = tuple(from_arguments([f"num_requests={requests}"]))
    config = resolve(
        recipes["inference_llama3.1"], RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200", settings=settings)
    )
    config = replace(config, predicted=predict_run(config))
    events = [_started(), ServingFacts(requests=requests, kv_blocks=1000, cache_bytes=2**34, weight_bytes=2**33)]
    for n in range(requests):
        arrival = 0.05 * n
        first = arrival + 0.02 + (1.5 if n < 5 else 0.001 * (n % 7))
        times = tuple(first + 0.01 * i for i in range(tokens))
        events.append(
            RequestDone(
                request=n, arrival=arrival, first_token=first, token_times=times, end=times[-1], input_tokens=100,
                output_tokens=tokens, requested_tokens=tokens,
            )
        )  # fmt: skip
    events += [*gpu_samples(0, 3, False), *gpu_samples(0, 10, True)]
    samples = 50
    for n in range(samples):
        use = {"waiting": n % 3, "running": 8, "blocks_used": 10 * n, "blocks": 1000}
        events.append(ServingSample(elapsed_s=0.05 * requests * n / samples, done=n, **use))
    return _record(config, [*events, RunEnded(time=1e6, status="ok")], label)


def hostile(record):
    """The same run with markup in all texts that come from outside."""
    warnings = (Caution(code="NOISY_STEPS", text=HOSTILE),)
    texts = {"name": HOSTILE, "reason": HOSTILE, "last_lines": (HOSTILE,), "gpu_name": HOSTILE, "host": HOSTILE}
    result = replace(record.result, **texts, warnings=warnings, versions={HOSTILE: HOSTILE})
    files = (("log", "a b/<log>.out"),)
    return replace(record, label=HOSTILE, result=result, command=HOSTILE, files=files)
