"""Collective timeouts that NCCL's watchdog reports: who waited, who was late, which node is excluded."""

from failed_runs import failed, job, ranks

from llmb.launch.failure import diagnose
from llmb.launch.nccl_watchdog import collective_timeout

WATCHDOG = (
    "[rank{rank}]:[E1206 18:44:12 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, NumelIn=5, NumelOut=1, Timeout(ms)=600000) ran for 600061 ms\n"
    "[rank{rank}]:[E1206 18:44:12.8 ProcessGroupNCCL.cpp:1664] [PG ID 1 PG GUID 3(dp) Rank {rank}] Exception (either"
    " an error or timeout) detected by watchdog at work: 7753, last enqueued NCCL work: {enqueued}, last completed:"
    " 7752.\n"
)


def test_collective_timeout_excludes_the_node_of_the_late_rank():
    log = "".join(WATCHDOG.format(rank=rank, enqueued=7755 if rank != 3 else 7753) for rank in range(4))
    failure = diagnose(failed("rank 0: exit code -6"), job("FAILED"), log, ranks(silent=(0, 1, 2, 3)))
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("nccl_timeout", True, ("n2",))
    expected = "_REDUCE_SCATTER_BASE timed out after 600 s; ranks 0-2 waited; rank 3 had not entered it (on n2)"
    assert failure.reason == expected


def test_silent_rank_is_late_for_the_collective():
    log = "".join(WATCHDOG.format(rank=rank, enqueued=7755) for rank in (0, 1, 2))
    timeout = collective_timeout(log, silent=(0, 1, 2, 3))
    assert (timeout.waiting, timeout.late) == ((0, 1, 2), (3,))
    failure = diagnose(failed("exit code 1"), job("FAILED"), log, ranks(silent=(0, 1, 2, 3)))
    assert failure.excluded_nodes == ("n2",)


def test_collective_timeout_of_all_ranks_excludes_no_node():
    log = "".join(WATCHDOG.format(rank=rank, enqueued=7755) for rank in range(4))
    failure = diagnose(failed("exit code 1"), job("FAILED"), log, ranks(silent=(0, 1, 2, 3)))
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("nccl_timeout", False, ())
    assert collective_timeout("step 1\n") is None
