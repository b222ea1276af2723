"""Figures of a run of one rank: measured compute and modelled communication, apart from each other and labelled.

one_rank_step(config, fields)      -> OneRankStep of a run with --one-rank
"""

from typing import Any

from llmb.config.parallel_layout import format_layout
from llmb.config.spec import RunConfig
from llmb.perfmodel.hardware import TERA
from llmb.perfmodel.shards import rank_flops
from llmb.perfmodel.step_time.one_rank_time import one_rank_time
from llmb.results.result import Comparison, OneRankStep

# Figures of all ranks, which one rank does not show.
CLUSTER_FIGURES = (
    "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "tflops_source", "mfu", "mfu_peak_tflops",
    "mfu_peak_dtype", "mfu_convention", "hfu", "days_per_1t_tokens", "slow_ranks", "joules_per_token",
)  # fmt: skip
METRIC = "measured compute and modelled communication of one rank"


def one_rank_step(config: RunConfig, fields: dict[str, Any]) -> OneRankStep | None:
    """Return the step of the rank from the measured window; None without one."""
    statistics = fields.get("step_time_s")
    if config.one_rank is None or config.pipeline_rank is None or statistics is None:
        return None
    measured = statistics.median
    modelled = one_rank_time(config, measured)
    total = None if modelled.total_s is None else measured + modelled.total_s
    return OneRankStep(
        rank=config.one_rank.rank,
        ranks=config.parallel.world_size,
        layout=format_layout(config.parallel),
        pipeline_rank=config.pipeline_rank,
        machine=config.one_rank.machine.gpu,
        measured_s=measured,
        tflops=rank_flops(config, config.pipeline_rank) / measured / TERA,
        communication_s=modelled.communication_s,
        bubble_s=modelled.bubble_s,
        step_time_s=total,
        reference=_reference(config, total) if fields["status"] == "ok" else None,
    )


def _reference(config: RunConfig, step_time_s: float | None) -> Comparison | None:
    """Compare the sum with the published step time of all ranks."""
    published = config.reference
    if published is None or published.step_time_s is None or step_time_s is None or config.proxy:
        return None
    ratio = published.step_time_s / step_time_s
    return Comparison(
        metric=METRIC, value=published.step_time_s, measured=step_time_s, ratio=ratio, source=published.source
    )
