"""Layouts, token budgets and concurrencies of a serving engine that are worth predicting.

    for setup in serving_space(base, gpus=8, fixed={}): ...      layouts with budgets, at a concurrency of 1

An engine occupies some of the GPUs and is replicated over all of them. Its tp ranks, or attention replicas, stay inside
an NVLink domain; a model without experts has no attention replicas, which would be engines of their own. Experts are
split over all ranks of a stage, by width, or by expert (ep) as far as their number allows: only TensorRT-LLM and the
native engine mix the two, which `--set ep=` asks for.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmb.config.model import Model
from llmb.config.parallel_layout import check_serving, divisors
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.step_time.measured_device import device_of

BUDGETS = (2048, 4096, 8192, 16384, 32768)  # tokens of an engine step
SERVING_DIMENSIONS = ("tp", "pp", "ep", "attention_dp", "max_num_tokens", "max_batch_size", "concurrency")


def serving_space(base: ServingSetup, gpus: int, fixed: Mapping[str, Any]) -> Iterator[ServingSetup]:
    """Yield every layout on a divisor of the GPUs with every token budget; the largest, of the fewest steps, first."""
    budgets = {fixed["max_num_tokens"]} if "max_num_tokens" in fixed else {*BUDGETS, base.max_num_tokens}
    for layout in serving_layouts(base.shape.model, device_of(base.gpu, base.rates).fabric.link_domain, gpus, fixed):
        for budget in sorted(budgets, reverse=True):
            fields: dict[str, Any] = {"max_num_tokens": budget, "concurrency": 1, **layout}
            yield replace(base, **fields)


def serving_layouts(model: Model, domain: int, gpus: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yield tp, pp, attention_dp, ep and moe_tp of engines whose replicas fill the GPUs."""
    for engine_gpus in divisors(gpus):
        for pp in divisors(engine_gpus):
            ranks = engine_gpus // pp  # of a pipeline stage
            if ranks > domain or pp > model.layers:
                continue
            for replicas in dict.fromkeys((1, ranks)) if model.experts else (1,):
                for ep in _expert_splits(model, ranks, fixed):
                    layout = {"tp": ranks // replicas, "pp": pp, "attention_dp": replicas, "ep": ep}
                    if all(fixed.get(name, value) == value for name, value in layout.items()) and _divides(
                        Parallel(tp=ranks, pp=pp, ep=ep), model, replicas > 1
                    ):
                        yield layout | {"moe_tp": ranks // ep if model.experts else 1}


def _expert_splits(model: Model, ranks: int, fixed: Mapping[str, Any]) -> Iterator[int]:
    """Yield ep."""
    if "ep" in fixed:
        yield from (fixed["ep"],) if ranks % fixed["ep"] == 0 else ()
    else:
        yield from dict.fromkeys((1, math.gcd(ranks, model.experts.count) if model.experts else 1))


def _divides(parallel: Parallel, model: Model, attention_dp: bool) -> bool:
    try:
        check_serving(parallel, model, attention_dp)
    except ConfigError:
        return False
    return True
