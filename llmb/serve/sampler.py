"""The next token of each sequence from its logits: the most likely, or drawn by temperature, top-k and top-p.

They apply in this order, as elsewhere: top-p counts probabilities among those that top-k has left. A draw takes one
number between 0 and 1, which follows from the request's seed and the place in its answer alone: so an answer does not
depend on what else the engine computes beside it, nor on how often it was interrupted.

Shapes: S sequences, V tokens of the vocabulary.
"""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from llmb.ops.sampling.argmax import argmax
from llmb.serve.request import Sampling

_MASK = 2**64 - 1


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1), by the mixing function of SplitMix64; the same everywhere."""
    x = (seed * 0x9E3779B97F4A7C15 + (place + 1) * 0xD1B54A32D192ED03) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return ((x ^ (x >> 31)) >> 11) / 2**53


def greedy(logits_SV: Tensor) -> Tensor:
    """The most likely token of each."""
    return argmax(logits_SV)


def sample(logits_SV: Tensor, how: Many[Sampling], draws: Many[float]) -> Tensor:
    """A token of each by its own settings; a temperature of 0 takes the most likely."""
    device = logits_SV.device
    temperature_S1, top_p_S1, draw_S1 = (
        torch.tensor(values, dtype=torch.float32, device=device)[:, None]
        for values in ([one.temperature for one in how], [one.top_p for one in how], list(draws))
    )
    vocab = logits_SV.shape[1]
    top_k_S1 = torch.tensor([one.top_k or vocab for one in how], device=device)[:, None]
    logits_SV = logits_SV.float() / temperature_S1.clamp(min=1e-6)
    sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    beyond_SV = torch.arange(vocab, device=device)[None] >= top_k_S1
    shares_SV = sorted_SV.masked_fill(beyond_SV, float("-inf")).softmax(dim=-1)
    before_SV = shares_SV.cumsum(dim=-1) - shares_SV
    kept_SV = (before_SV < top_p_S1) & ~beyond_SV
    kept_SV[:, 0] = True  # the most likely token always stays
    reach_SV = (shares_SV * kept_SV).cumsum(dim=-1)
    # The first token whose reach exceeds the draw; rounding must not lead past the last that is kept.
    place_S1 = (reach_SV <= draw_S1 * reach_SV[:, -1:]).sum(dim=-1, keepdim=True)
    place_S1 = torch.minimum(place_S1, kept_SV.sum(dim=-1, keepdim=True) - 1)
    place_S1 = torch.where(temperature_S1 > 0, place_S1, 0)
    return order_SV.gather(1, place_S1).squeeze(1)
