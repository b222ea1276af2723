"""Part `peer` of `outofcore_gpu.py`: what everybody trains a Llama with on one GPU, in the device memory of our rows.

Each in a process of its own with a time limit, so that whatever becomes of it the other figures stand; what exactly it
is, `train_peer.py` says. One that runs out of memory goes on with half as many sequences at once.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from measure.device import release_memory
from measure.peer_process import describe_result, run_peer

from outofcore.outofcore_bench import Bench


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One set-up, and the row whose device memory it has."""

    name: str
    row: str
    seqlen: int
    device_gib: float
    gbs: int  # sequences a step
    mbs: int  # of these, in one forward and backward pass, if they fit
    fsdp: bool = False  # weights, gradients and optimizer state on the host
    checkpointing: bool = True  # every layer computed again
    offload: bool = False  # what is kept for the backward pass waits on the host
    limit_s: float

    @property
    def title(self) -> str:
        state = ["FSDP2 with CPU offload"] if self.fsdp else []
        activations = ["gradient checkpointing"] if self.checkpointing else []
        activations += ["save_on_cpu"] if self.offload else []
        return " + ".join(["transformers", *state, *activations])


PEERS = (
    Peer(name="liger", row="65536/110/78", seqlen=65536, device_gib=78, gbs=1, mbs=1, limit_s=120),
    Peer(name="offload", row="8192/75/78", seqlen=8192, device_gib=78, gbs=1, mbs=1, checkpointing=False,
         offload=True, limit_s=120),
    Peer(name="fsdp", row="8192/60/24", seqlen=8192, device_gib=24, gbs=16, mbs=4, fsdp=True, limit_s=150),
    Peer(name="fsdp_offload", row="65536/80/30", seqlen=65536, device_gib=30, gbs=1, mbs=1, fsdp=True,
         offload=True, limit_s=150),
)  # fmt: skip


def peers(bench: Bench, rows: set[str]) -> None:
    """Run the peers of these rows one by one, then print a table. Tiny: only the one with all features."""
    our_speeds = _our_speeds(bench)
    release_memory(bench.device)
    lines = []
    for peer in (peer for peer in (PEERS[-1:] if bench.tiny else PEERS) if peer.row in rows):
        bench.print_heading(f"Peer of {peer.row}: {peer.title}")
        result = _run(peer, bench.tiny)
        speed, ours_tokens_per_s = result.get("tokens_per_s"), our_speeds.get(peer.row)
        ratio = ours_tokens_per_s / speed if ours_tokens_per_s and speed else None
        print(f"  {json.dumps(result)}", flush=True)
        bench.record(
            "peer", asdict(peer) | {"title": peer.title} | result | {"ours": ours_tokens_per_s, "ratio": ratio}
        )
        memory, how = result.get("memory_gib"), describe_result(result)
        lines.append((peer.row, peer.title, speed, ours_tokens_per_s, ratio, memory, how))
    if lines:
        bench.print_table(
            "Peers, in the device memory of the row, tokens/s",
            ("row", "what", "theirs", "ours", "ratio", "GiB", ""),
            lines,
            "bf16 weights and AdamW state, 8 bytes a weight as ours; a pass and an update to warm up, then one step",
        )


def _our_speeds(bench: Bench) -> dict[str, float]:
    """The rows' speeds in this run, by title; of two batches of a row the first one's, which is the row's own."""
    done = [row for row in bench.results.get("rows", []) if "error" not in row]
    return {row["title"]: row["tokens_per_s"] for row in reversed(done)}


def _run(peer: Peer, tiny: bool) -> dict[str, Any]:
    """Return the result of its process, or why there is none."""
    seqlen, gbs = (32, min(peer.gbs, 4)) if tiny else (peer.seqlen, peer.gbs)
    arguments = ["--kind", "best", "--seqlen", str(seqlen), "--gbs", str(gbs), "--mbs", str(min(peer.mbs, gbs))]
    arguments += ["--device-gib", str(peer.device_gib), "--steps", "1"]
    flags = {"--fsdp": peer.fsdp, "--checkpointing": peer.checkpointing, "--offload": peer.offload, "--tiny": tiny}
    arguments += [flag for flag, enabled in flags.items() if enabled]
    return run_peer("train_peer.py", arguments, peer.limit_s)
