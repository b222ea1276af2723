"""NCCL traces (NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL): how often which collective moved how many bytes.

    [7] NCCL INFO AllReduce: opCount 2 sendbuff 0x7f... recvbuff 0x7f... count 1 datatype 1 op 0 root 0
        comm 0x55556b100660 [nranks=128] stream 0x5555630c58b0                                  (one line in the log)

Such a log has millions of lines and few kinds of them, so each kind is parsed once and the rest is counting. What every
line must still pass through is one regular expression, and its shape decides the speed:

- One group only: `findall` then gives plain bytes, which are counted at half the price of tuples. The name of the operation
  stands before the addresses and all else behind them, so one group cannot hold both; instead each of the six common
  operations begins its capture at another letter of the word "count", and that beginning tells the operation.
- `.{22}` skips without looking. No torn line can hide behind it: the next line's own "opCount" comes later than that.
- Possessive repeats, because nothing that is skipped ever needs to be given back.

A head that this pattern cannot follow to a valid tail (another operation, a torn line, two ranks writing at once) yields a
capture that is not valid, and then its block is read again line by line. So the shortcut is exact or not taken.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from llmb.events import CollectiveSeen, Event, LogProblem, RunEnded

# ncclDataType_t: the number in the log, its name, its bytes.
DATATYPES = {
    0: ("int8", 1),
    1: ("uint8", 1),
    2: ("int32", 4),
    3: ("uint32", 4),
    4: ("int64", 8),
    5: ("uint64", 8),
    6: ("float16", 2),
    7: ("float32", 4),
    8: ("float64", 8),
    9: ("bfloat16", 2),
    10: ("fp8e4m3", 1),
    11: ("fp8e5m2", 1),
}

BLOCK_BYTES = 256 << 10  # fits a core's cache; also what is read again when a line is torn
LINE_BYTES = 64 << 10  # longer lines are cut
PARALLEL_BYTES = 64 << 20  # below this a second process costs more than it saves
MAX_WORKERS = 4

# operation -> how to reach its capture, and what the capture then begins with
_CAPTURES = {
    "AllReduce": (rb"[^t]*+t ", b""),
    "AllGather": (rb"[^t]*+t", b" "),
    "ReduceScatter": (rb"[^t]*+", b"t "),
    "Broadcast": (rb"[^o]*+ou", b"nt "),
    "Send": (rb"[^o]*+o", b"unt "),
    "Recv": (rb"[^o]*+", b"ount "),
}
_OPERATION = {begin: operation for operation, (_, begin) in _CAPTURES.items()}
_REACH = b"|".join(name.encode() + rb": opCount.{22}+" + reach for name, (reach, _) in _CAPTURES.items())
_FAST = re.compile(rb"NCCL INFO (?:(?:" + _REACH + rb")(.{38}+[^\]]*+)|\w++: opCount)", re.DOTALL)
_KEY = re.compile(rb"((?:ou)?(?:n?t)? ?|unt )(\d{1,18}) datatype (\d{1,9}) op \d+ root \d+ comm \w+ \[nranks=(\d{1,9})")
