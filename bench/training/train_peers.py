"""Part `peers` of `train_gpu.py`: what people train a Llama with today, on the shapes and tokens of our own rows.

Each in a process of its own with a time limit; what exactly it is, `train_peer.py` says. All are started ahead, import
what they need while others run, and have the GPU one after the other. Ours is compared with the best of its format.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from measure.peer_process import PeerProcess, describe_result

from training.train_bench import Bench
from training.train_rows import ROWS, Dtype, Row, work_of

COUNTED = 6  # sequences of steps that count, at least


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train the model of a row."""

    kind: str  # of train_peer.py
    dtype: Dtype
    limit_s: float

    @property
    def row(self) -> str:
        """The title of the row it is compared with."""
        return f"{ROWS[0].name} {self.dtype}"


AIMS = {"bf16": 1.06, "fp8": 1.25}  # over the best peer
PEERS = (
    Peer(kind="transformers", dtype="bf16", limit_s=90),
    Peer(kind="liger", dtype="bf16", limit_s=90),
    Peer(kind="torchtitan", dtype="bf16", limit_s=150),
    Peer(kind="torchtitan", dtype="fp8", limit_s=180),
)


def start_peers(bench: Bench) -> list[tuple[Peer, PeerProcess]]:
    """Start the peers of the requested rows."""
    titles = {row.title: row for row in bench.rows}
    return [(peer, _started(bench, peer, titles[peer.row])) for peer in PEERS if peer.row in titles]


def _started(bench: Bench, peer: Peer, row: Row) -> PeerProcess:
    work = work_of(bench.configuration(row))
    arguments = ["--kind", peer.kind, "--dtype", peer.dtype, "--seqlen", str(work.seqlen), "--gbs", str(work.gbs)]
    steps = 1 if bench.tiny else -(-COUNTED // work.gbs)
    arguments += ["--mbs", str(work.mbs), "--steps", str(steps), "--wait"]
    return PeerProcess("train_peer.py", [*arguments, *(["--tiny"] if bench.tiny else [])])


def peers(bench: Bench, waiting: Sequence[tuple[Peer, PeerProcess]]) -> None:
    """One after the other, then all in a table beside ours."""
    bench.clear()
    results = []
    for peer, started in waiting:
        bench.print_heading(f"Peer of {peer.row}: {peer.kind}")
        result = started.result(peer.limit_s)
        print(f"  {json.dumps(result)}", flush=True)
        bench.record("peers", {"kind": peer.kind, "dtype": peer.dtype, "row": peer.row} | result)
        results.append((peer, result))
    for dtype in AIMS:
        _print_table(bench, dtype, [(peer, result) for peer, result in results if peer.dtype == dtype])


def _print_table(bench: Bench, dtype: str, results: list[tuple[Peer, dict[str, Any]]]) -> None:
    if not results:
        return
    our_row: dict[str, Any] = next(
        (row for row in bench.results.get("rows", []) if row["title"] == results[0][0].row), {}
    )
    speed = our_row.get("tokens_per_s")
    best = max((result["tokens_per_s"] for _, result in results if "tokens_per_s" in result), default=None)
    ratio = speed / best if speed and best else None
    lines = [
        (peer.kind, result.get("tokens_per_s"), _over(speed, result), result.get("memory_gib"), describe_result(result))
        for peer, result in results
    ]
    lines.append(("ours", speed, None, our_row["memory_bytes"] / 2**30 if "memory_bytes" in our_row else None, "llmb"))
    bench.print_table(
        f"Peers in {dtype}, tokens/s",
        ("what", "tokens/s", "ours over it", "GiB", ""),
        lines,
        f"ours over the best: {'unknown' if ratio is None else f'{ratio:.3f}'}, aim {AIMS[dtype]}",
        "theirs: bf16 weights and AdamW state, no gradient clipping; same shapes and tokens, random weights",
    )
    bench.record("ratios", {"dtype": dtype, "ours": speed, "best_peer": best, "ratio": ratio, "aim": AIMS[dtype]})


def _over(speed: float | None, result: dict[str, Any]) -> float | None:
    return speed / result["tokens_per_s"] if speed and result.get("tokens_per_s") else None
