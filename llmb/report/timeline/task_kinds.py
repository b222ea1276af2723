"""Kinds of work on the lanes: what each is called, its colour, and the texture that tells it apart without colour.

    kind("inbound", "param").label -> "weights"

One colour stands for one kind in both directions of the link. A name that is not listed keeps its name and is grey.
"""

from dataclasses import dataclass
from typing import Literal

from llmb.perfmodel.offload.stream_timeline import LANES, Lane

Texture = Literal["plain", "slant", "cross", "dots", "bars", "rows"]
LANE_LABELS: dict[Lane, str] = {"compute": "Compute", "inbound": "Copies in", "outbound": "Copies out"}


@dataclass(frozen=True)
class Kind:
    """How a kind of work is called and drawn."""

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
    Kind("embedding", "embedding", "#2f8f83", "bars"),
    Kind("forward", "forward", "#2f6fbf"),
    Kind("head", "head", "#e3a535", "dots", pale=True),
    Kind("recompute", "recompute", "#a9cbf2", "slant", pale=True),
    Kind("backward", "backward", "#2c4484"),
    Kind("embedding_backward", "embedding backward", "#12463f", "bars"),
    Kind("update", "update", "#b8325a", "cross"),
)
COPY_KINDS = (
    Kind("param", "weights", "#3f8f46"),
    Kind("grad", "gradients", "#9a5a22", "slant"),
    Kind("state", "optimizer state", "#b8325a", "cross"),
    Kind("inp", "block inputs", "#5d6fc9", "rows"),
    Kind("kv", "keys and values", "#23899b", "bars"),
    Kind("attn", "attention outputs", "#c3a2e2", "dots", pale=True),
    Kind("rest", "activations", "#5b3486"),
    Kind("dstream", "stream gradients", "#c7a11e", "slant", pale=True),
    Kind("dkv", "gradients of keys and values", "#7f8526", "dots"),
)
WAIT = Kind("wait", "waits", "#d03b3b", "slant", pale=True)  # the compute lane stands still
OTHER = Kind("other", "other", "#7c8490", "bars")
_LISTED = (*COMPUTE_KINDS, *COPY_KINDS, WAIT)
KINDS = (*_LISTED, OTHER)  # all that are drawn


def kind(lane: Lane, name: str) -> Kind:
    """The kind of a stretch by its lane and name."""
    listed = (*COMPUTE_KINDS, WAIT) if lane == "compute" else COPY_KINDS
    found = next((k for k in listed if k.name == name), None)
    return found or Kind(name, name, OTHER.colour, OTHER.texture)


def order(work: tuple[Lane, str]) -> tuple[int, int, str]:
    """Sorts (lane, name) as the pictures stack them: by lane, the listed ones in their order, then the rest by name."""
    lane, name = work
    names = [k.name for k in (*COMPUTE_KINDS, WAIT, *COPY_KINDS)]
    return LANES.index(lane), names.index(name) if name in names else len(names), name
