"""Algorithm and bus bandwidth of collectives, by the definitions of NCCL-tests (doc/PERFORMANCE.md).

Algorithm bandwidth is size over time. Bus bandwidth is what a link carries, so that it can be compared with the link's
own rate whatever the number of ranks. Size: of the whole buffer of a rank: an all-reduce's tensor, an all-gather's
output, a reduce-scatter's input, what an all-to-all sends.
"""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
OPERATIONS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth."""
    return (2.0 if operation == ALL_REDUCE else 1.0) * (ranks - 1) / ranks


def bandwidths_gbs(operation: str, ranks: int, size: int, seconds: float) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in GB/s."""
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * bus_factor(operation, ranks)
