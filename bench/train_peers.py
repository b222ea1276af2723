"""Part `peers` of `train_gpu.py`: what people train a Llama with today, on the shapes and tokens of our own rows.

Each in a process of its own with a time limit; what exactly it is, `train_peer.py` says. All are started ahead, import
what they need while others run, and have the GPU one after the other. Ours is compared with the best of its format.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peer_process import Started
from train_bench import Bench
from train_rows import ROWS, Dtype, Row, work_of

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


def peers_in_waiting(bench: Bench) -> list[tuple[Peer, Started]]:
    """Those of the rows asked for."""
    titles = {row.title: row for row in bench.rows}
    return [(peer, _started(bench, peer, titles[peer.row])) for peer in PEERS if peer.row in titles]


def _started(bench: Bench, peer: Peer, row: Row) -> Started:
    work = work_of(bench.configuration(row))
    arguments = ["--kind", peer.kind, "--dtype", peer.dtype, "--seqlen", str(work.seqlen), "--gbs", str(work.gbs)]
    steps = 1 if bench.tiny else -(-COUNTED // work.gbs)
    arguments += ["--mbs", str(work.mbs), "--steps", str(steps), "--wait"]
    return Started("train_peer.py", [*arguments, *(["--tiny"] if bench.tiny else [])])


def peers(bench: Bench, waiting: Sequence[tuple[Peer, Started]]) -> None:
    """One after the other, then all in a table beside ours."""
    bench.clear()
    said = []
    for peer, started in waiting:
        bench.head(f"Peer of {peer.row}: {peer.kind}")
        found = started.found(peer.limit_s)
        print(f"  {json.dumps(found)}", flush=True)
        bench.keep("peers", {"kind": peer.kind, "dtype": peer.dtype, "row": peer.row} | found)
        said.append((peer, found))
    for dtype in AIMS:
        _say(bench, dtype, [(peer, found) for peer, found in said if peer.dtype == dtype])


def _say(bench: Bench, dtype: str, said: list[tuple[Peer, dict[str, Any]]]) -> None:
    if not said:
        return
    ours: dict[str, Any] = next((row for row in bench.results.get("rows", []) if row["title"] == said[0][0].row), {})
    speed = ours.get("tokens_per_s")
    best = max((found["tokens_per_s"] for _, found in said if "tokens_per_s" in found), default=None)
    ratio = speed / best if speed and best else None
    lines = [
        (peer.kind, found.get("tokens_per_s"), _over(speed, found), found.get("memory_gib"), _what(found))
        for peer, found in said
    ]
    lines.append(("ours", speed, None, ours["memory_bytes"] / 2**30 if "memory_bytes" in ours else None, "llmb"))
    bench.say(
        f"Peers in {dtype}, tokens/s",
        ("what", "tokens/s", "ours over it", "GiB", ""),
        lines,
        f"ours over the best: {'unknown' if ratio is None else f'{ratio:.3f}'}, aim {AIMS[dtype]}",
        "theirs: bf16 weights and AdamW state, no gradient clipping; same shapes and tokens, random weights",
    )
    bench.keep("ratios", {"dtype": dtype, "ours": speed, "best_peer": best, "ratio": ratio, "aim": AIMS[dtype]})


def _over(speed: float | None, found: dict[str, Any]) -> float | None:
    return speed / found["tokens_per_s"] if speed and found.get("tokens_per_s") else None


def _what(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"not here: {found['skipped']}"
    return found.get("error") or f"{found['version']}, {found['how']}, {found['mbs']} at once"
