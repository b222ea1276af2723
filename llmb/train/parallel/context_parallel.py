"""Context parallelism: the tokens of a sequence are sharded over ranks, which communicate in attention only.

A sequence is split into 2 * cp equal chunks, and rank i of cp holds chunks i and 2 * cp - 1 - i: with causal masking
early chunks have little work and late ones much, and every such pair has the same amount.

Queries stay. Keys and values of all ranks are all-gathered in one collective, and each of a rank's two chunks attends
to the keys up to its end. In the backward pass each rank gets the sum of all ranks' gradients of its keys and values.
MLA gathers the decompressed keys and values, not the smaller latents.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llmb.models.architectures import Network
from llmb.models.blocks import Attention, causal_attention
from llmb.models.mla import MLAAttention
from llmb.train.parallel.activation_collectives import all_gather
from llmb.train.parallel.mesh import Mesh


def apply_context_parallel(model_part: Network, mesh: Mesh) -> None:
    """Let each attention gather the keys and values of the full sequence, and give each token its position."""
    if mesh.size("cp") == 1:
        return
    model_part.positions = partial(shard_positions, mesh.index("cp"), mesh.size("cp"))
    for module in model_part.modules():
        if isinstance(module, Attention | MLAAttention):
            module.attend = partial(cp_attention, mesh.submesh("cp"))


def shard_sequence(sequence_BT: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's tokens of full sequences: an early chunk of each, then a late one."""
    ranks = mesh.size("cp")
    if ranks == 1:
        return sequence_BT
    chunks = sequence_BT.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[index] for index in chunk_indices(mesh.index("cp"), ranks)], dim=1)


def chunk_indices(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of the two chunks that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def shard_positions(rank: int, ranks: int, tokens: int, device: torch.device) -> Tensor:
    """Return the positions in the sequence of a rank's `tokens` tokens."""
    offset_P = torch.arange(tokens // 2, device=device)
    return torch.cat([offset_P + index * len(offset_P) for index in chunk_indices(rank, ranks)])


def cp_attention(
    mesh: DeviceMesh,
    q_BHQD: Tensor,
    k_BHQD: Tensor,
    v_BHQD: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `causal_attention` of this rank's two chunks over the full sequence."""
    k_BHTD, v_BHTD = _gather_kv(mesh, k_BHQD, v_BHQD)
    early_BHPD, late_BHPD = q_BHQD.chunk(2, dim=2)
    chunk = early_BHPD.shape[2]
    outputs = []
    for index, q_BHPD in zip(chunk_indices(mesh.get_local_rank(), mesh.size()), (early_BHPD, late_BHPD), strict=True):
        end = (index + 1) * chunk
        outputs.append(causal_attention(q_BHPD, k_BHTD[:, :, :end], v_BHTD[:, :, :end], scale=scale, softcap=softcap))
    return torch.cat(outputs, dim=2)


def _gather_kv(mesh: DeviceMesh, k_BHQD: Tensor, v_BHQD: Tensor) -> tuple[Tensor, Tensor]:
    """Return all ranks' keys and values in the order of the sequence."""
    kv_QBHD = torch.cat((k_BHQD, v_BHQD), dim=-1).permute(2, 0, 1, 3)  # tokens first: gathered without another copy
    early_RPBHD, late_RPBHD = all_gather(kv_QBHD, mesh, dim=0).unflatten(0, (mesh.size(), 2, -1)).unbind(1)
    kv_TBHD = torch.cat((early_RPBHD, late_RPBHD.flip(0))).flatten(0, 1)
    k_TBHD, v_TBHD = kv_TBHD.split((k_BHQD.shape[-1], v_BHQD.shape[-1]), dim=-1)
    return k_TBHD.permute(1, 2, 0, 3), v_TBHD.permute(1, 2, 0, 3)
