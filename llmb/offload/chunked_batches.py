"""The batch of each optimizer step, cut as the plan cuts it: tokens, labels, positions, and what attends to what.

    batches = Batches(model, plan, seed, data, pack=False, device)
    for group in batches.step(1):                     # steps count from 1
        cos_ND, sin_ND = batches.rope_rows(group, rows)

Sequence number n has the same tokens as in ordinary training (`llmb/train`), so losses can be compared. Packed, a
sequence is a stretch of a token file and each text in it a document of its own: positions begin again, attention stays
inside, and the token that closes a text has nothing to predict. All of a step goes to the device in one copy that the
host does not wait for; what attends to what stays on the host. Shapes: T tokens of a group, N of some of its rows.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.blocks import positions_in_order, rope_table
from llmb.models.decoder import rope_of
from llmb.ops.attention.segment_attention import Span, spans_of
from llmb.perfmodel.offload.step_tasks import Chunk, chunks_of
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.runtime.token_data import TokenFile

IGNORED = -100  # the label of a token with nothing to predict
HOST = torch.device("cpu")


class GroupBatch(NamedTuple):
    """The sequences of one group, one behind the other."""

    tokens_T: Tensor  # int64 on the device, as the other two
    labels_T: Tensor
    positions_T: Tensor  # in the token's document
    spans: tuple[tuple[Span, ...], ...]  # of each chunk
    counted: int  # labels of the whole step that count: the loss is their mean


class Batches:
    """Makes any step's batch from the step's number alone, so a run that is resumed goes on where it was."""

    def __init__(self, model: Model, plan: Plan, seed: int, data: TokenFile | None, pack: bool, device: torch.device):
        if pack and (data is None or data.header.end is None):
            which = "no token file is given" if data is None else f"{data.path} has none"
            raise ConfigError(f"packing documents needs a token file with an end-of-text token; {which}")
        self._vocab, self._plan, self._seed = model.vocab, plan, seed
        self._data, self._pack, self._device = data, pack, device
        self._chunks: list[list[Chunk]] = [[] for _ in range(plan.groups)]
        for round_ in range(plan.rounds):
            for chunk in chunks_of(plan, round_):
                self._chunks[chunk.group].append(chunk)
        # Of the rows of a group whose sequences are whole; of a document's places the first of them.
        in_order_T = positions_in_order(plan.seqlen, device).repeat(plan.seqs_per_group)
        self._cos_TD, self._sin_TD = rope_table(rope_of(model), model.head_dim, in_order_T)

    def step(self, step: int) -> list[GroupBatch]:
        """All groups of a step."""
        first = (step - 1) * self._plan.gbs
        shape = (self._plan.gbs, self._plan.seqlen + 1)
        if self._data is None:
            tokens_BT = synthetic_tokens(self._seed, first, shape, self._vocab, HOST)
        else:
            tokens_BT = self._data.sequences(first, shape, HOST)
        closes_BT = self._closing(tokens_BT.numpy()[:, :-1], first)
        positions_BT = _positions(closes_BT)
        labels_BT = np.where(closes_BT, IGNORED, tokens_BT[:, 1:].numpy())
        counted = closes_BT.size - int(closes_BT.sum())
        beginnings = np.flatnonzero(positions_BT == 0)
        host_3T = torch.stack([tokens_BT[:, :-1], torch.from_numpy(labels_BT), torch.from_numpy(positions_BT)])
        return self._groups(self._on_device(host_3T.flatten(1)), beginnings, counted)

    def rope_rows(self, group: GroupBatch, rows: slice) -> tuple[Tensor, Tensor]:
        """Cosine and sine of some tokens' positions, [N, half a head's width] in fp32, on the device."""
        if not self._pack:
            return self._cos_TD[rows], self._sin_TD[rows]
        positions_N = group.positions_T[rows]
        return self._cos_TD.index_select(0, positions_N), self._sin_TD.index_select(0, positions_N)

    def _closing(self, tokens_BT: np.ndarray, first: int) -> np.ndarray:
        """Where a document ends inside the batch; one that a sequence's border cuts does not end there."""
        if not self._pack:
            return np.zeros(tokens_BT.shape, bool)
        assert self._data is not None
        header = self._data.header
        places_BT = first * self._plan.seqlen + np.arange(tokens_BT.size).reshape(tokens_BT.shape)
        last_BT = (places_BT + 1) % header.tokens == 0  # of the file, which begins again behind it
        closes_BT = (tokens_BT == header.end) | last_BT
        if closes_BT.all():
            raise ConfigError(f"{self._data.path}: a whole step of texts of one token, with nothing to predict")
        return closes_BT

    def _on_device(self, host_3T: Tensor) -> Tensor:
        if self._device.type == "cuda":  # the copy from pinned memory does not make the host wait for the device
            return host_3T.pin_memory().to(self._device, non_blocking=True)
        return host_3T.to(self._device)

    def _groups(self, batch_3T: Tensor, beginnings: np.ndarray, counted: int) -> list[GroupBatch]:
        found = []
        for group, chunks in enumerate(self._chunks):
            first = group * self._plan.group_tokens
            rows = slice(first, first + chunks[-1].first + chunks[-1].tokens)
            inside = slice(*np.searchsorted(beginnings, (rows.start, rows.stop)))
            begun = (beginnings[inside] - first).tolist()
            spans = tuple(spans_of(begun, chunk.first, chunk.first + chunk.tokens) for chunk in chunks)
            tokens_T, labels_T, positions_T = batch_3T[:, rows].unbind()
            found.append(GroupBatch(tokens_T, labels_T, positions_T, spans, counted))
        return found


def _positions(closes_BT: np.ndarray) -> np.ndarray:
    """Each token's place in its document; a sequence begins with a document, or with the rest of one."""
    begins_BT = np.ones_like(closes_BT)
    begins_BT[:, 1:] = closes_BT[:, :-1]
    place_T = np.arange(closes_BT.shape[1])
    return place_T - np.maximum.accumulate(np.where(begins_BT, place_T, 0), axis=1)
