"""Part `peer` of `outofcore_gpu.py`: what everybody trains a Llama with on one GPU, in the device memory of our rows.

Each in a process of its own with a time limit, so that whatever becomes of it the other figures stand; what exactly it
is, `outofcore_peer.py` says. One that runs out of memory is tried again with half as many sequences at once.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from device import let_go
from outofcore_bench import Bench
from peer_process import found_by

ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One set-up, and the row whose device memory it has."""

    name: str
    row: str
    seqlen: int
    device_gib: float
    gbs: int  # sequences a step
    at_once: int  # of these, in one forward and backward pass
    fsdp: bool = False  # weights, gradients and optimizer state on the host
    checkpointing: bool = True  # every layer computed again
    offload: bool = False  # what is kept for the backward pass waits on the host
    limit_s: float

    @property
    def title(self) -> str:
        state = ["FSDP2 with CPU offload"] if self.fsdp else []
        kept = ["gradient checkpointing"] if self.checkpointing else []
        kept += ["save_on_cpu"] if self.offload else []
        return " + ".join(["transformers", *state, *kept])


PEERS = (
    Peer(name="liger", row="65536/110/78", seqlen=65536, device_gib=78, gbs=1, at_once=1, limit_s=120),
    Peer(name="offload", row="8192/75/78", seqlen=8192, device_gib=78, gbs=1, at_once=1, checkpointing=False,
         offload=True, limit_s=120),
    Peer(name="fsdp", row="8192/60/24", seqlen=8192, device_gib=24, gbs=16, at_once=4, fsdp=True, limit_s=150),
    Peer(name="fsdp_offload", row="65536/80/30", seqlen=65536, device_gib=30, gbs=1, at_once=1, fsdp=True,
         offload=True, limit_s=150),
)  # fmt: skip


def peers(bench: Bench, rows: set[str]) -> None:
    """Those of these rows, one after the other, then all in a table beside ours. Tiny: the one that does everything."""
    ours = _ours(bench)
    let_go(bench.device)
    said = []
    for peer in (peer for peer in (PEERS[-1:] if bench.tiny else PEERS) if peer.row in rows):
        bench.head(f"Peer of {peer.row}: {peer.title}")
        found = _run(peer, bench.tiny)
        speed, mine = found.get("tokens_per_s"), ours.get(peer.row)
        ratio = mine / speed if mine and speed else None
        print(f"  {json.dumps(found)}", flush=True)
        bench.keep("peer", asdict(peer) | {"title": peer.title} | found | {"ours": mine, "ratio": ratio})
        memory, how = found.get("memory_gib"), found.get("error") or _how(found)
        said.append((peer.row, peer.title, speed, mine, ratio, memory, how))
    if said:
        bench.say(
            "Peers, in the device memory of the row, tokens/s",
            ("row", "what", "theirs", "ours", "ratio", "GiB", ""),
            said,
            "bf16 weights and AdamW state, 8 bytes a weight as ours; a pass and an update to warm up, then one step",
        )


def _ours(bench: Bench) -> dict[str, float]:
    """The rows' speeds in this run, by title; of two batches of a row the first one's, which is the row's own."""
    done = [row for row in bench.results.get("rows", []) if "error" not in row]
    return {row["title"]: row["tokens_per_s"] for row in reversed(done)}


def _how(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    return f"{found['version']}, {found['kernels']}, {found['gbs']} sequences a step, {found['at_once']} at once"


def _run(peer: Peer, tiny: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at_once = peer.at_once
    for _ in range(ATTEMPTS):
        found = _attempt(peer, at_once, tiny)
        if "out of memory" not in found.get("error", "").lower() or at_once == 1:
            break
        at_once //= 2
    return found


def _attempt(peer: Peer, at_once: int, tiny: bool) -> dict[str, Any]:
    """What its process printed, or why it printed nothing."""
    seqlen, gbs = (32, min(peer.gbs, 4)) if tiny else (peer.seqlen, peer.gbs)
    arguments = ["--seqlen", str(seqlen), "--gbs", str(gbs), "--at-once", str(min(at_once, gbs))]
    arguments += ["--device-gib", str(peer.device_gib)]
    flags = {"--fsdp": peer.fsdp, "--checkpointing": peer.checkpointing, "--offload": peer.offload, "--tiny": tiny}
    arguments += [flag for flag, given in flags.items() if given]
    return found_by("outofcore_peer.py", arguments, peer.limit_s)
