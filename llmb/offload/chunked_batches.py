"""Batch of each optimizer step, divided as the plan says: tokens, labels, positions, and attention segments.

    batches = ChunkedBatches(model, plan, seed, data, pack=False, device)
    for group in batches.step(1):                     # steps count from 1
        cos_ND, sin_ND = batches.rope_rows(group, rows, kind)

Sequence number n has the same tokens as in ordinary training (`llmb/train`), so losses can be compared. Packed, a
sequence is a range of a token file and each text in it a document: positions restart, attention stays inside, and the
last token of a text predicts nothing. A step goes to the device in one asynchronous copy; the attention segments stay
on the host. Shapes: T tokens of a group, N of some of its rows.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.errors import ConfigError
from llmb.models.blocks import rope_table, sequential_positions
from llmb.models.decoder import rope_config
from llmb.ops.attention.segment_attention import Segment, chunk_segments
from llmb.perfmodel.offload.step_tasks import Chunk, round_chunks
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.runtime.token_data import TokenFile

IGNORED = -100  # label of a token that predicts nothing
HOST = torch.device("cpu")


class GroupBatch(NamedTuple):
    """Sequences of one group, concatenated."""

    tokens_T: Tensor  # int64 on the device, as the other two
    labels_T: Tensor
    positions_T: Tensor  # in the token's document
    segments: tuple[tuple[Segment, ...], ...]  # attention segments of each chunk
    num_labels: int  # labels of the whole step that are not ignored: the loss is their mean


class ChunkedBatches:
    """Any step's batch follows from the step's number alone, so a resumed run continues with the right data."""

    def __init__(self, model: Model, plan: Plan, seed: int, data: TokenFile | None, pack: bool, device: torch.device):
        if pack and (data is None or data.header.end is None):
            which = "no token file is given" if data is None else f"{data.path} has none"
            raise ConfigError(f"packing documents needs a token file with an end-of-text token; {which}")
        self._vocab, self._plan, self._seed = model.vocab, plan, seed
        self._data, self._pack, self._device = data, pack, device
        self._chunks: list[list[Chunk]] = [[] for _ in range(plan.groups)]
        for round_ in range(plan.rounds):
            for chunk in round_chunks(plan, round_):
                self._chunks[chunk.group].append(chunk)
        # For the rows of a group of whole sequences; packed documents index it by position.
        in_order_T = sequential_positions(plan.seqlen, device).repeat(plan.seqs_per_group)
        full = rope_config(model)
        ropes = {"F": full, "N": full, "S": model.local_rope or full}  # N: given, and left alone
        tables = {rope: rope_table(rope, model.head_dim, in_order_T, plan.seqlen) for rope in set(ropes.values())}
        self._rope_tables = {kind: tables[rope] for kind, rope in ropes.items()}

    def step(self, step: int) -> list[GroupBatch]:
        """Return all groups of a step."""
        first = (step - 1) * self._plan.gbs
        shape = (self._plan.gbs, self._plan.seqlen + 1)
        if self._data is None:
            tokens_BT = synthetic_tokens(self._seed, first, shape, self._vocab, HOST)
        else:
            tokens_BT = self._data.sequences(first, shape, HOST)
        closes_BT = self._closing(tokens_BT.numpy()[:, :-1], first)
        positions_BT = _positions(closes_BT)
        labels_BT = np.where(closes_BT, IGNORED, tokens_BT[:, 1:].numpy())
        num_labels = closes_BT.size - int(closes_BT.sum())
        beginnings = np.flatnonzero(positions_BT == 0)
        host_3T = torch.stack([tokens_BT[:, :-1], torch.from_numpy(labels_BT), torch.from_numpy(positions_BT)])
        return self._groups(self._on_device(host_3T.flatten(1)), beginnings, num_labels)

    def rope_rows(self, group: GroupBatch, rows: slice, kind: str = "F") -> tuple[Tensor, Tensor]:
        """Return cosine and sine of some tokens' positions, [N, half a head's width] in fp32, on the device.

        `kind` is a letter of the model's attention pattern.
        """
        cos_TD, sin_TD = self._rope_tables[kind]
        if not self._pack:
            return cos_TD[rows], sin_TD[rows]
        positions_N = group.positions_T[rows]
        return cos_TD.index_select(0, positions_N), sin_TD.index_select(0, positions_N)

    def _closing(self, tokens_BT: np.ndarray, first: int) -> np.ndarray:
        """Return where a document ends inside the batch; one that is cut by the end of a sequence does not."""
        if not self._pack:
            return np.zeros(tokens_BT.shape, bool)
        assert self._data is not None
        header = self._data.header
        index_BT = first * self._plan.seqlen + np.arange(tokens_BT.size).reshape(tokens_BT.shape)
        last_BT = (index_BT + 1) % header.tokens == 0  # of the file, which starts over behind it
        closes_BT = (tokens_BT == header.end) | last_BT
        if closes_BT.all():
            raise ConfigError(f"{self._data.path}: a whole step of texts of one token, with nothing to predict")
        return closes_BT

    def _on_device(self, host_3T: Tensor) -> Tensor:
        if self._device.type == "cuda":  # the copy from pinned memory does not make the host wait for the device
            return host_3T.pin_memory().to(self._device, non_blocking=True)
        return host_3T.to(self._device)

    def _groups(self, batch_3T: Tensor, beginnings: np.ndarray, num_labels: int) -> list[GroupBatch]:
        groups = []
        for group, chunks in enumerate(self._chunks):
            first = group * self._plan.group_tokens
            rows = slice(first, first + chunks[-1].first + chunks[-1].tokens)
            inside = slice(*np.searchsorted(beginnings, (rows.start, rows.stop)))
            begun = (beginnings[inside] - first).tolist()
            segments = tuple(chunk_segments(begun, chunk.first, chunk.first + chunk.tokens) for chunk in chunks)
            tokens_T, labels_T, positions_T = batch_3T[:, rows].unbind()
            groups.append(GroupBatch(tokens_T, labels_T, positions_T, segments, num_labels))
        return groups


def _positions(closes_BT: np.ndarray) -> np.ndarray:
    """Return each token's position in its document; a sequence begins with a document, or with the remainder of one."""
    begins_BT = np.ones_like(closes_BT)
    begins_BT[:, 1:] = closes_BT[:, :-1]
    index_T = np.arange(closes_BT.shape[1])
    return index_T - np.maximum.accumulate(np.where(begins_BT, index_T, 0), axis=1)
