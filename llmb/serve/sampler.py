"""Sampling of the next tokens from logits: greedy, or by temperature, top-k and top-p.

They apply in this order, as is usual: top-p counts probabilities among the tokens that top-k has left. A sample takes
one random number, which follows from the request's seed and the position in its output alone: so an output depends
neither on what else is in the batch nor on preemption.

Shapes: S sequences, V vocabulary.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.ops.sampling.argmax import argmax
from llmb.serve.request import SamplingParams, TokenLogprobs

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) by the mixing function of SplitMix64; the same on every machine."""
    x = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return ((x ^ (x >> 31)) >> 11) / 2**53


def greedy(logits_SV: Tensor) -> Tensor:
    """Return the most likely token of each sequence."""
    return argmax(logits_SV)


def sample(logits_SV: Tensor, params: Many[SamplingParams], draws: Many[float]) -> Tensor:
    """Sample a token of each sequence by its own parameters; a temperature of 0 is greedy."""
    device = logits_SV.device
    vocab = logits_SV.shape[1]
    rows = [
        [param.temperature, param.top_p, float(param.top_k or vocab), draw]
        for param, draw in zip(params, draws, strict=True)
    ]
    temperature_S1, top_p_S1, top_k_S1, draw_S1 = _upload(rows, torch.float32, device).split(1, dim=1)
    logits_SV = logits_SV.float() / temperature_S1.clamp(min=1e-6)
    sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    beyond_SV = torch.arange(vocab, device=device)[None] >= top_k_S1
    probs_SV = sorted_SV.masked_fill(beyond_SV, float("-inf")).softmax(dim=-1)
    before_SV = probs_SV.cumsum(dim=-1) - probs_SV
    mask_SV = (before_SV < top_p_S1) & ~beyond_SV
    mask_SV[:, 0] = True  # the most likely token always stays
    cdf_SV = (probs_SV * mask_SV).cumsum(dim=-1)
    # The first token whose CDF exceeds the draw; rounding must not lead past the last token of the mask.
    rank_S1 = (cdf_SV <= draw_S1 * cdf_SV[:, -1:]).sum(dim=-1, keepdim=True)
    rank_S1 = torch.minimum(rank_S1, mask_SV.sum(dim=-1, keepdim=True) - 1)
    rank_S1 = torch.where(temperature_S1 > 0, rank_S1, 0)
    return order_SV.gather(1, rank_S1).squeeze(1)


@dataclass(frozen=True)
class LogprobRows:
    """Log probabilities of some of a step's tokens, on their way to the host. Shapes: R rows, K alternatives."""

    rows: list[int]  # indices among the sampled tokens
    counts: list[int]  # alternatives that each request asks for
    logprob_R: Tensor
    top_logprobs_RK: Tensor
    top_tokens_RK: Tensor

    def to_host(self) -> "LogprobRows":
        """Start the D2H copies."""
        tensors = (self.logprob_R, self.top_logprobs_RK, self.top_tokens_RK)
        return LogprobRows(self.rows, self.counts, *(_copy_to_pinned(tensor) for tensor in tensors))

    def read(self) -> dict[int, TokenLogprobs]:
        """Return them by index; the copies must have arrived."""
        tops = zip(self.top_tokens_RK.tolist(), self.top_logprobs_RK.tolist(), strict=True)
        entries = zip(self.rows, self.counts, self.logprob_R.tolist(), tops, strict=True)
        return {
            row: TokenLogprobs(logprob, tuple(zip(tokens[:count], logprobs[:count], strict=True)))
            for row, count, logprob, (tokens, logprobs) in entries
        }


def compute_logprobs(logits_SV: Tensor, tokens_S: Tensor, params: Many[SamplingParams]) -> LogprobRows | None:
    """Return the log probabilities of the tokens whose parameters ask for them; None: no request does."""
    rows = [row for row, param in enumerate(params) if param.logprobs is not None]
    if not rows:
        return None
    counts = [params[row].logprobs or 0 for row in rows]
    rows_R = _upload(rows, torch.int64, logits_SV.device)
    logprobs_RV = logits_SV[rows_R].float().log_softmax(dim=-1)
    top = logprobs_RV.topk(min(max(counts), logprobs_RV.shape[1]), dim=-1)
    logprob_R = logprobs_RV.gather(1, tokens_S[rows_R, None]).squeeze(1)
    return LogprobRows(rows, counts, logprob_R, top.values, top.indices)


def _upload(values: Many[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Start the H2D copy of some values: from pinned memory, so that the host does not wait for launched steps."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
