"""Stream timelines of a plausible engine: copies run ahead of compute, compute waits where they are late."""

from dataclasses import dataclass, field

from llmb.perfmodel.offload.stream_timeline import MemoryUse, Phase, StreamName, StreamTimeline, TimelineEvent


@dataclass
class Engine:
    """Simulated steps of training: weights and activations cross a link in both directions while layers compute."""

    layers: int = 8
    chunks: int = 2
    rounds: int = 2
    resident: int = 3  # layers whose weights and activations stay on the device
    recomputed: int = 2  # layers, the first ones, of which not everything is saved
    forward_s: float = 0.010  # of one chunk
    weight_bytes: int = 400_000_000
    saved_bytes: int = 500_000_000
    link_gbs: float = 50.0
    tflops: float = 600.0
    events: list[TimelineEvent] = field(default_factory=list)
    memory: list[MemoryUse] = field(default_factory=list)
    free: dict[StreamName, float] = field(default_factory=lambda: {"compute": 0.0, "inbound": 0.0, "outbound": 0.0})
    ready: dict[tuple, float] = field(default_factory=dict)
    saved: int = 0

    def streams(self, steps: int, source: str = "measured") -> StreamTimeline:
        for step in range(steps):
            for round_ in range(self.rounds):
                self.round(step, round_)
            self.update(step)
        return StreamTimeline(
            source=source,
            events=tuple(self.events),
            memory=tuple(self.memory),
            link_gbs=(self.link_gbs, self.link_gbs),
            peak_tflops=989.0,
        )

    def work(
        self, stream: StreamName, name: str, seconds: float, after: float, phase: Phase, step: int, **more
    ) -> float:
        start = max(self.free[stream], after)
        self.free[stream] = start + seconds
        flops = seconds * self.tflops * 1e12 if stream == "compute" and phase not in ("update", "embedding") else 0.0
        self.events.append(
            TimelineEvent(
                stream=stream, name=name, start=start, end=start + seconds, step=step, phase=phase, flops=flops, **more
            )
        )
        self.memory.append(
            MemoryUse(time=start, device_bytes=60 * 2**30 - self.saved // 3, host_bytes=90 * 2**30 + self.saved)
        )
        return start + seconds

    def copy(self, stream: StreamName, name: str, count: int, after: float, phase: Phase, step: int, **more) -> float:
        return self.work(stream, name, count / (self.link_gbs * 1e9), after, phase, step, bytes=count, **more)

    def round(self, step: int, round_: int) -> None:
        here = {"step": step, "round": round_}
        self.work("compute", "embedding", self.forward_s / 20, 0.0, "embedding", **here)
        for layer in range(self.layers):
            begin = self.free["compute"]
            ahead = layer + self.resident
            if ahead < self.layers:
                self.ready["param", ahead] = self.copy(
                    "inbound", "param", self.weight_bytes, begin, "forward", layer=ahead, **here
                )
            for chunk in range(self.chunks):
                place = {"layer": layer, "chunk": chunk, "group": 0, **here}
                done = self.work(
                    "compute", "forward", self.forward_s, self.ready.get(("param", layer), 0), "forward", **place
                )
                if layer < self.layers - self.resident:
                    part = self.saved_bytes // (3 if layer < self.recomputed else 1)
                    name = "attn" if layer < self.recomputed else "rest"
                    self.saved += part
                    self.copy("outbound", name, part, done, "forward", **place)
        for chunk in reversed(range(self.chunks)):
            self.work("compute", "head", 3 * self.forward_s, 0.0, "head", chunk=chunk, **here)
        for layer in reversed(range(self.layers)):
            self.backward(layer, here)
        self.work("compute", "embedding", self.forward_s / 20, 0.0, "embedding", **here)

    def backward(self, layer: int, here: dict) -> None:
        begin = self.free["compute"]
        lower = layer - self.resident
        if lower >= 0:
            weights = self.copy("inbound", "param", self.weight_bytes, begin, "backward", layer=lower, **here)
            self.ready["param", lower] = weights
        for chunk in reversed(range(self.chunks)):
            place = {"layer": layer, "chunk": chunk, "group": 0, **here}
            if lower >= 0:
                part = self.saved_bytes // (3 if lower < self.recomputed else 1)
                name = "attn" if lower < self.recomputed else "rest"
                self.saved -= part
                self.ready["saved", lower, chunk] = self.copy(
                    "inbound", name, part, begin, "backward", **{**place, "layer": lower}
                )
            needed = max(self.ready.get(("param", layer), 0), self.ready.get(("saved", layer, chunk), 0))
            if layer < self.recomputed:
                self.work("compute", "recompute", 0.6 * self.forward_s, needed, "backward", **place)
            self.work("compute", "backward", 2.1 * self.forward_s, needed, "backward", **place)
        self.copy("outbound", "grad", self.weight_bytes, self.free["compute"], "backward", layer=layer, **here)

    def update(self, step: int) -> None:
        """One layer after the other: its state comes, is stepped, goes home."""
        for layer in range(self.layers):
            came = self.copy("inbound", "state", self.weight_bytes, 0.0, "update", step, layer=layer)
            done = self.work("compute", "update", 0.002, came, "update", step, layer=layer)
            self.copy("outbound", "state", self.weight_bytes, done, "update", step, layer=layer)


def small(source: str = "measured", **more) -> StreamTimeline:
    """2 steps of 2 rounds of 8 layers of 2 chunks."""
    return Engine(**more).streams(2, source)
