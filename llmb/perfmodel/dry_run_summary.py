"""Result of a dry run: memory, FLOPs and collectives of one rank in a step, at the run's real size.

`llmb/train/dry_run/dry_run.py` computes it on the meta device, without a GPU; `llmb-run show --memory` prints it.
"""

from dataclasses import dataclass

from llmb.perfmodel.communication import CollectiveTraffic


@dataclass(frozen=True, kw_only=True)
class DryRunSummary:
    """Bytes at the memory peak, of a rank of the first or last pipeline stage, whichever needs more."""

    rank: int
    parameters: int  # that this rank's optimizer updates
    weight_bytes: int  # all-gathered ones included
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # everything else
    peak_bytes: int
    host_bytes: int  # offloaded
    flops: float  # of GEMMs, attention and scans, recomputation included
    bubble: float  # fraction of a step that this rank waits in the pipeline, if all stages are equally fast
    collectives: tuple[CollectiveTraffic, ...]
    seconds: float  # duration of the dry run
