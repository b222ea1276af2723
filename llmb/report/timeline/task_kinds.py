"""Kinds of work on the streams: label, colour, and the texture that distinguishes it without colour.

    work_kind("inbound", "param").label -> "weights"

A kind has the same colour in both directions of the link. An unknown kind keeps its name and is grey.
"""

from dataclasses import dataclass
from typing import Literal

from llmb.perfmodel.offload.stream_timeline import STREAMS, StreamName

Texture = Literal["plain", "slant", "cross", "dots", "bars", "rows"]
STREAM_LABELS: dict[StreamName, str] = {
    "compute": "Compute", "inbound": "Copies in", "outbound": "Copies out",
    "disk_read": "Disk reads", "disk_write": "Disk writes",
}  # fmt: skip
# Behind the label of a kind of work, and behind a unit.
DIRECTIONS: dict[StreamName, str] = {
    "compute": "", "inbound": " in", "outbound": " out", "disk_read": " from disk", "disk_write": " to disk",
}  # fmt: skip


@dataclass(frozen=True)
class WorkKind:
    """Label and drawing style of a kind of work."""

    name: str
    label: str
    colour: str
    texture: Texture = "plain"
    pale: bool = False  # its labels are dark

    @property
    def short(self) -> str:
        return SHORT.get(self.name, self.label[:3])

    @property
    def css_class(self) -> str:
        return f"k-{self.name}" if self in _LISTED else "k-other"


SHORT = {"forward": "fwd", "backward": "bwd", "recompute": "rec", "embedding": "emb", "update": "upd"}
COMPUTE_KINDS = (
    WorkKind("embedding", "embedding", "#2f8f83", "bars"),
    WorkKind("forward", "forward", "#2f6fbf"),
    WorkKind("head", "head", "#e3a535", "dots", pale=True),
    WorkKind("recompute", "recompute", "#a9cbf2", "slant", pale=True),
    WorkKind("backward", "backward", "#2c4484"),
    WorkKind("embedding_backward", "embedding backward", "#12463f", "bars"),
    WorkKind("update", "update", "#b8325a", "cross"),
)
COPY_KINDS = (
    WorkKind("param", "weights", "#3f8f46"),
    WorkKind("grad", "gradients", "#9a5a22", "slant"),
    WorkKind("state", "optimizer state", "#b8325a", "cross"),
    WorkKind("inp", "block inputs", "#5d6fc9", "rows"),
    WorkKind("kv", "keys and values", "#23899b", "bars"),
    WorkKind("attn", "attention outputs", "#c3a2e2", "dots", pale=True),
    WorkKind("rest", "activations", "#5b3486"),
    WorkKind("dstream", "residual gradients", "#c7a11e", "slant", pale=True),
    WorkKind("dkv", "gradients of keys and values", "#7f8526", "dots"),
)
WAIT = WorkKind("wait", "waits", "#d03b3b", "slant", pale=True)  # the compute stream is idle
OTHER = WorkKind("other", "other", "#7c8490", "bars")
_LISTED = (*COMPUTE_KINDS, *COPY_KINDS, WAIT)
KINDS = (*_LISTED, OTHER)  # all that are drawn


def work_kind(stream: StreamName, name: str) -> WorkKind:
    """Return the kind of an event by its stream and name."""
    listed = (*COMPUTE_KINDS, WAIT) if stream == "compute" else COPY_KINDS
    match = next((k for k in listed if k.name == name), None)
    return match or WorkKind(name, name, OTHER.colour, OTHER.texture)


def order(work: tuple[StreamName, str]) -> tuple[int, int, str]:
    """Sort key of (stream, name) in pictures: by stream, known kinds in their order, then others by name."""
    stream, name = work
    names = [k.name for k in (*COMPUTE_KINDS, WAIT, *COPY_KINDS)]
    return STREAMS.index(stream), names.index(name) if name in names else len(names), name
