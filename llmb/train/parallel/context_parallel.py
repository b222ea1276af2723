"""Context parallelism: the tokens of a sequence are on several ranks, which meet in attention only.

A sequence is cut into 2 * cp equal pieces, and rank i of cp holds pieces i and 2 * cp - 1 - i: a token attends to all
before it, so an early piece has little work and a late one much, and each such pair has as much as any other.

Queries stay. Keys and values of all ranks are gathered, both in one exchange, and each of a rank's two pieces attends
to the keys up to its own end. In the backward pass each rank gets the sum of all ranks' gradients of its own keys and
values. Latent attention exchanges what its heads read, not the narrower latents.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llmb.models.architectures import Network
from llmb.models.blocks import Attention, causal_attention
from llmb.models.mla import LatentAttention
from llmb.train.parallel.activation_collectives import gathered
from llmb.train.parallel.mesh import Mesh


def split_context(part: Network, mesh: Mesh) -> None:
    """Give each attention the keys and values of the whole sequence, and each token its position."""
    if mesh.size("cp") == 1:
        return
    part.positions = partial(own_positions, mesh.index("cp"), mesh.size("cp"))
    for module in part.modules():
        if isinstance(module, Attention | LatentAttention):
            module.attend = partial(attention_over_ranks, mesh.sub("cp"))


def own_tokens(sequence_BT: Tensor, mesh: Mesh) -> Tensor:
    """This rank's tokens of whole sequences: an early piece of each, then a late one."""
    ranks = mesh.size("cp")
    if ranks == 1:
        return sequence_BT
    pieces = sequence_BT.chunk(2 * ranks, dim=1)
    return torch.cat([pieces[number] for number in own_pieces(mesh.index("cp"), ranks)], dim=1)


def own_pieces(rank: int, ranks: int) -> tuple[int, int]:
    """The numbers of the pieces that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def own_positions(rank: int, ranks: int, tokens: int, device: torch.device) -> Tensor:
    """Where in the sequence the tokens of a rank stand, which has that many."""
    piece_P = torch.arange(tokens // 2, device=device)
    return torch.cat([piece_P + number * len(piece_P) for number in own_pieces(rank, ranks)])


def attention_over_ranks(
    mesh: DeviceMesh,
    q_BHQD: Tensor,
    k_BHQD: Tensor,
    v_BHQD: Tensor,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """`causal_attention` of this rank's two pieces in the whole sequence."""
    k_BHTD, v_BHTD = _whole(mesh, k_BHQD, v_BHQD)
    early_BHPD, late_BHPD = q_BHQD.chunk(2, dim=2)
    piece = early_BHPD.shape[2]
    mixed = []
    for number, q_BHPD in zip(own_pieces(mesh.get_local_rank(), mesh.size()), (early_BHPD, late_BHPD), strict=True):
        end = (number + 1) * piece
        mixed.append(causal_attention(q_BHPD, k_BHTD[:, :, :end], v_BHTD[:, :, :end], scale=scale, cap=cap))
    return torch.cat(mixed, dim=2)


def _whole(mesh: DeviceMesh, k_BHQD: Tensor, v_BHQD: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' keys and values in the order of the sequence."""
    kv_QBHD = torch.cat((k_BHQD, v_BHQD), dim=-1).permute(2, 0, 1, 3)  # tokens first: gathered without another copy
    early_RPBHD, late_RPBHD = gathered(kv_QBHD, mesh, dim=0).unflatten(0, (mesh.size(), 2, -1)).unbind(1)
    kv_TBHD = torch.cat((early_RPBHD, late_RPBHD.flip(0))).flatten(0, 1)
    k_TBHD, v_TBHD = kv_TBHD.split((k_BHQD.shape[-1], v_BHQD.shape[-1]), dim=-1)
    return k_TBHD.permute(1, 2, 0, 3), v_TBHD.permute(1, 2, 0, 3)
