"""Rows of routed tokens in the buffers that expert-parallel ranks exchange, without a host read of any size.

    row_map_NK, ends_PE = assign_send_rows(topk_ids_NK, row_map_NK, ends_PE, capacity, overflow)
    row_map_R1, ends_E = sort_received_rows(ends_BE, rows)

Each pair of ranks exchanges `capacity` rows, sorted by expert, padding last. Where there are more, the last ones are
dropped: their row is -1, as `permute.py` takes it. So is the row of received padding. All are int32.

Shapes: N tokens, K experts per token, P ranks that rows are sent to and E experts on each, B ranks that rows are
received from, R rows received from all of them, T from each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op


@op
def assign_send_rows(
    topk_ids_NK: Tensor, row_map_NK: Tensor, ends_PE: Tensor, capacity: int, overflow: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rows of the send buffer for rows sorted by expert, and the end of each expert in its rank's part of it.

    Adds to `overflow` the number of ranks with more rows than the capacity.
    """
    starts_P = F.pad(ends_PE[:-1, -1], (1, 0))
    ends_PE = ends_PE - starts_P[:, None]
    overflow += (ends_PE[:, -1] > capacity).sum()
    rank_NK = topk_ids_NK // ends_PE.shape[1]
    row_NK = row_map_NK - starts_P[rank_NK]
    row_map_NK = torch.where(row_NK < capacity, row_NK + rank_NK * capacity, -1)
    return row_map_NK.int(), ends_PE.clamp(max=capacity)


@op
def sort_received_rows(ends_BE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return each received row's row in a stable sort by expert, -1 for padding, and the row after each expert's last.

    `ends_BE`: of each expert among the rows of each rank.
    """
    blocks, experts = ends_BE.shape
    counts_BE = ends_BE.diff(dim=1, prepend=ends_BE.new_zeros(blocks, 1))
    sorted_ends_EB = counts_BE.T.flatten().cumsum(0, dtype=torch.int32).view(experts, blocks)
    row_BT = torch.arange(rows // blocks, dtype=torch.int32, device=ends_BE.device).repeat(blocks, 1)
    expert_BT = torch.searchsorted(ends_BE.contiguous(), row_BT, right=True)  # `experts` for padding
    shift_BE = F.pad(sorted_ends_EB.T - ends_BE, (0, 1))
    row_BT = torch.where(expert_BT < experts, row_BT + shift_BE.gather(1, expert_BT), -1)
    return row_BT.view(-1, 1), sorted_ends_EB[:, -1].contiguous()
