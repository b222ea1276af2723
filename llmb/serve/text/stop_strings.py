"""Stop strings: text that ends an output and is not part of it, wherever the tokens' boundaries are.

matcher = StopMatcher(["END", "\\n\\n"])
matcher.push("the E")      # "the ": "E" is held back, it may begin "END"
matcher.push("ND of")      # "", and matcher.matched is True
"""

from collections.abc import Sequence


class StopMatcher:
    """Searches one output."""

    def __init__(self, stops: Sequence[str]):
        self.matched = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that certainly precedes any stop string; nothing after a match."""
        if self.matched:
            return ""
        text = self._held + text
        positions = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if positions:
            self.matched, self._held = True, ""
            return text[: min(positions)]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text begin the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
