"""Assignment of save levels: how much each (layer, chunk) saves for backward, given how many may save what.

Those that stay on the device longest save most. Among the others, those that save everything are spread evenly, to keep
the load of the link constant; those that save least are the ones whose attention is cheapest to recompute, the first
chunks of a sequence.
"""

from llmb.config.offload_plan import ATTENTION, FULL, INPUT


def save_levels(
    layers: int, chunks: int, chunks_per_group: int, whole: int, light: int, full: int, attention: int
) -> str:
    """Return a letter for each chunk of a round, layer by layer.

    The last `whole` are fully saved on the device, where also the `light` ones before them are, with attention. Of the
    others, which are on the host, `full` and `attention` save so much.
    """
    away = layers * chunks - whole - light
    full = min(full, away)
    fully_saved = {i for i in range(away) if (i + 1) * full // away > i * full // away} if away else set()
    partly_saved = [i for i in range(away) if i not in fully_saved]
    costliest = sorted(partly_saved, key=lambda i: (-(i % chunks % chunks_per_group), _scattered(i // chunks)))
    attention_saved = set(costliest[: min(attention, len(partly_saved))])
    letters = [FULL if i in fully_saved else ATTENTION if i in attention_saved else INPUT for i in range(away)]
    return "".join(letters) + ATTENTION * light + FULL * whole


def _scattered(layer: int) -> int:
    """Order of layers in which any first few lie far apart: their numbers with the bits reversed."""
    return int(f"{layer:016b}"[::-1], 2)
