"""Capacity of expert parallelism: each pair of ranks exchanges a fixed number of rows, so the host need not know more.

    pair_capacity(rows, experts, ep, factor)     # rows that a rank with `rows` routed ones sends to each rank of ep
    dispatched_rows(config)                      # rows that it sends to all of them, padding included

The factor is relative to an even load. With `balanced_experts` 1 suffices; else a step in which some pair has more rows
is repeated with a larger one (`llmb/train/parallel/expert_parallel.py`). With a factor of ep every routing fits.
"""

import math

from llmb.config.spec import RunConfig, Training

CAPACITY_FACTOR = 1.25  # at the start of a run
ROW_ALIGNMENT = 16


def initial_capacity_factor(work: Training) -> float:
    """Return the factor that a run starts with."""
    return 1.0 if work.balanced_experts else CAPACITY_FACTOR


def pair_capacity(rows: int, experts: int, ep: int, factor: float) -> int:
    """Return the rows that a rank with `rows` routed ones sends to each rank of ep: as many as it has at most."""
    balanced = -(-rows // experts) * (experts // ep)
    return min(rows, math.ceil(balanced * factor / ROW_ALIGNMENT) * ROW_ALIGNMENT)


def dispatched_rows(config: RunConfig) -> int:
    """Return the rows that a rank sends to all ranks of ep at the start of a run; without ep its routed rows."""
    work, parallel, experts = config.workload, config.parallel, config.model.experts
    assert isinstance(work, Training)
    assert experts is not None
    factor = initial_capacity_factor(work)
    return parallel.ep * pair_capacity(routed_rows(config), experts.count, parallel.ep, factor)


def routed_rows(config: RunConfig) -> int:
    """Return the token-expert pairs of a rank in a micro-batch."""
    work, parallel, experts = config.workload, config.parallel, config.model.experts
    assert isinstance(work, Training)
    assert experts is not None
    return work.mbs * work.seqlen // parallel.cp // parallel.tp * experts.top_k
