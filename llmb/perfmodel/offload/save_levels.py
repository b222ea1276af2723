"""Which (layer, chunk) keeps how much for the way back, when it is known how many may keep what.

Those that stay on the device longest keep most. Among the others those that keep everything are spread evenly, so that
the link has the same to carry all the time; those that keep least are the ones whose attention is cheapest to compute
again, the first chunks of a sequence.
"""

from llmb.config.offload_plan import ATTENTION, FULL, INPUT


def levels(layers: int, chunks: int, chunks_per_group: int, whole: int, light: int, full: int, attention: int) -> str:
    """A letter for each chunk of a round, layer by layer.

    The last `whole` are so, and on the device, where the `light` ones before them are, too. Of the others, which wait
    on the host, `full` and `attention` keep so much.
    """
    away = layers * chunks - whole - light
    full = min(full, away)
    chosen = {place for place in range(away) if (place + 1) * full // away > place * full // away} if away else set()
    others = [place for place in range(away) if place not in chosen]
    dearest = sorted(others, key=lambda place: (-(place % chunks % chunks_per_group), _scattered(place // chunks)))
    kept = set(dearest[: min(attention, len(others))])
    letters = [FULL if p in chosen else ATTENTION if p in kept else INPUT for p in range(away)]
    return "".join(letters) + ATTENTION * light + FULL * whole


def _scattered(layer: int) -> int:
    """An order of layers in which any first few lie far apart: their numbers with the bits turned round."""
    return int(f"{layer:016b}"[::-1], 2)
