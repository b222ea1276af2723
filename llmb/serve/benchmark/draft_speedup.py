"""Time per output token with and without drafts: one batch of requests, decoded twice in the same process.

    plain, drafted = tpot_ms(plain_engine(engine), ...), tpot_ms(engine, ...)

So their ratio is a property of the drafts, not of the machine's mood nor of prompts that are computed beside. The
engine must be idle. Without drafts its target runs under a scheduler of its own, which stays a step ahead of the
device, as every engine without drafts does.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

from llmb.config.spec import Inference
from llmb.loadgen.prompt_sampler import Prompt
from llmb.serve.engine import Engine
from llmb.serve.request import Request
from llmb.serve.scheduler import Scheduler
from llmb.serve.speculative.speculative_runner import SpeculativeRunner


def plain_engine(engine: Engine) -> Engine:
    """Return an engine without drafts on the target and the cache of an idle one."""
    assert isinstance(engine.runner, SpeculativeRunner)
    return Engine(Scheduler(engine.scheduler.pool, engine.scheduler.limits), engine.runner.target)


def tpot_ms(engine: Engine, work: Inference, eos: frozenset[int], prompts: Sequence[Prompt]) -> float | None:
    """Decode the prompts, all at once; return the mean over requests, None if no output has a second token."""
    times = defaultdict[int, list[float]](list)

    def on_token(request_id: int, _token: int) -> None:
        times[request_id].append(time.perf_counter())

    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(
                request_id=number,
                prompt=prompt.tokens,
                max_tokens=prompt.output_tokens,
                eos=eos,
                ignore_eos=work.ignore_eos,
                on_token=on_token,
            )
        )
    engine.drain()
    tpots = [(stamps[-1] - stamps[0]) / (len(stamps) - 1) for stamps in times.values() if len(stamps) > 1]
    return 1e3 * sum(tpots) / len(tpots) if tpots else None
