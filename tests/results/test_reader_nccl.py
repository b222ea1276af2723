"""NCCL traces: exact counts whatever the block size, the number of processes and the damage; and fast."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmb.events import CollectiveSeen, LogProblem, RunEnded
from llmb.results.readers import nccl_log
from llmb.results.readers.reader_choice import read_log

LOGS = Path(__file__).parent.parent / "golden" / "logs"
EXAMPLE = (
    "[7] NCCL INFO AllReduce: opCount 2 sendbuff 0x7ffb4713c200 recvbuff 0x7ffb4713c200 count 1 datatype 1 op 0 root 0 "
    "comm 0x55556b100660 [nranks=128] stream 0x5555630c58b0"
)


def test_the_published_line():
    seen, end = nccl_log.read([EXAMPLE])
    assert seen == CollectiveSeen(operation="AllReduce", calls=1, bytes=1, datatype="uint8", ranks=128)
    assert end == RunEnded(status="ok")


def test_one_event_for_each_operation_datatype_and_communicator_size():
    *seen, end = read_log(LOGS / "nccl.log")
    assert {(e.operation, e.datatype, e.ranks): (e.calls, e.bytes) for e in seen} == {
        ("AllReduce", "uint8", 128): (6, 6),
        ("AllReduce", "float32", 8): (6, 6 * 33554432 * 4),
        ("AllGather", "bfloat16", 16): (6, 6 * 16777216 * 2),
        ("ReduceScatter", "float32", 16): (6, 6 * 16777216 * 4),
        ("Broadcast", "int64", 128): (6, 6 * 2 * 8),
        ("Send", "bfloat16", 2): (6, 6 * 8388608 * 2),
        ("Recv", "bfloat16", 2): (6, 6 * 8388608 * 2),
        ("AlltoAll", "fp8e4m3", 8): (1, 4096),
        ("AllReduce", "datatype 42", 8): (1, None),
    }
    assert end == RunEnded(status="ok")


def test_lines_and_file_give_the_same():
    path = LOGS / "nccl.log"
    assert list(nccl_log.read(path.read_bytes().splitlines())) == list(nccl_log.read_file(path))


def test_a_trace_without_collectives_says_so(tmp_path):
    path = tmp_path / "empty.log"
    path.write_bytes(b"")
    assert list(read_log(path, "nccl")) == [RunEnded(status="incomplete", reason="no collective lines")]


REPEATS = 10  # of what is drawn, so that it spans blocks; a block is longer than any line drawn
CALLS = st.tuples(
    st.sampled_from(["AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Send", "Recv", "Reduce", "AlltoAll"]),
    st.integers(0, 10**12),
    st.integers(0, 15),
    st.integers(1, 10**5),
)
LINES = st.one_of(
    st.tuples(
        CALLS,
        st.sampled_from(["[7] ", "", "node-1:12:34 [0] ", "3: node:1:2 [3] "]),
        st.sampled_from(["0x7ffb4713c200", "(nil)", "0x1", "0xffffffffffffffff"]),
        st.sampled_from(["", "acc (nil) "]),
        st.integers(0, 2**40),
        st.one_of(st.none(), st.integers(0, 200)),  # where the line is torn
        st.sampled_from(["\n", ""]),  # and whether the next one begins on a line of its own
    ),
    st.sampled_from(
        [
            " [2025-12-19 10:49:15] iteration 1/ 50 | elapsed time per iteration (ms): 20289.1 | lm loss: 1.2 |\n",
            "[7] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n",
            "[7] NCCL INFO AllReduce: 4 Bytes -> Algo RING proto LL time 10.1\n",
            "\n",
        ]
    ),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINES, max_size=40), st.sampled_from([10_000, 1 << 18]), st.booleans())
def test_counts_are_exact_in_torn_and_interleaved_logs(tmp_path, monkeypatch, drawn, block, parallel):
    expected: Counter = Counter()
    torn = 0
    text = ""
    for item in drawn:
        if isinstance(item, str):
            text += item
            continue
        (operation, count, datatype, ranks), prefix, pointer, acc, number, cut, end = item
        head = f"{prefix}NCCL INFO {operation}: opCount"
        line = (
            f"{head} {number:x} sendbuff {pointer} recvbuff {pointer} {acc}count {count} datatype {datatype} "
            f"op 0 root 0 comm 0x55556b100660 [nranks={ranks}]"
        )
        whole = cut is None or cut >= len(line)
        text += line + " stream 0x5555630c58b0\n" if whole else line[:cut] + end
        if whole:
            expected[operation, datatype, ranks] += 1
        else:
            torn += cut >= len(head)
    path = tmp_path / "trace.log"
    path.write_text((text + "\n") * REPEATS)
    monkeypatch.setattr(nccl_log, "BLOCK_BYTES", block)
    monkeypatch.setattr(nccl_log, "PARALLEL_BYTES", 0 if parallel and len(drawn) > 30 else 1 << 30)
    events = list(nccl_log.read_file(path))
    names = {number: nccl_log.DATATYPES.get(number, (f"datatype {number}", None))[0] for number in range(16)}
    seen = {(e.operation, e.datatype, e.ranks): e.calls for e in events if isinstance(e, CollectiveSeen)}
    assert seen == {
        (operation, names[number], ranks): n * REPEATS for (operation, number, ranks), n in expected.items()
    }
    assert [e for e in events if isinstance(e, LogProblem)] == (
        [LogProblem(problem="torn line of a collective", count=torn * REPEATS)] if torn else []
    )


def test_a_log_of_ever_new_sizes_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(nccl_log, "MANY_KINDS", 100)
    path = tmp_path / "trace.log"
    path.write_text("".join(EXAMPLE.replace("count 1 ", f"count {n} ") + "\n" for n in range(5000)))
    (seen,) = nccl_log.summarize(path)
    assert (seen.calls, seen.bytes) == (5000, sum(range(5000)))
