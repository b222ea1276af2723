"""What a rehearsal of a run found: one rank's memory, work and exchanges in a step, at the run's real size.

`llmb/train/dry_run/dry_run.py` makes it, on a machine that needs no GPU; `llmb-run show --memory` prints it.
"""

from dataclasses import dataclass

from llmb.perfmodel.communication import Collective


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Bytes are those of the moment when most were held, by a rank of the first or last stage, whichever holds more."""

    rank: int
    parameters: int  # numbers that this rank's optimizer updates
    weight_bytes: int  # with those gathered from other ranks
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # all the rest
    peak_bytes: int
    host_bytes: int  # offloaded
    flops: float  # of matrix products, attention and scans, with what is computed twice
    bubble: float  # the share of a step that this rank waits for others in the pipeline, if all parts take as long
    collectives: tuple[Collective, ...]
    seconds: float  # that the rehearsal took
