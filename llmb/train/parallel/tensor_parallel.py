"""Tensor parallelism: the weights inside a block split over ranks, the stream between blocks along the sequence.

    split_tensors(part, mesh)      # a part with shapes only, on device meta; one rank: nothing changes

A block's first weights are cut by what they make (heads, channels, Mamba groups) and its last weight by what it takes,
so that each rank does the block's work on its share of them and has a summand of the result. Every rank sees all tokens
inside a block: it gathers them before, and of the sum after it keeps its own piece of the sequence. Norms, routers and
all that works token by token between blocks sees only the rank's own piece.

Shapes: B sequences, T tokens, C hidden width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from llmb.models.architectures import Network
from llmb.models.blocks import Attention, GatedMlp, PlainMlp
from llmb.models.mamba2 import MambaMixer
from llmb.models.mla import LatentAttention
from llmb.train.parallel.activation_collectives import gathered, scattered_sum
from llmb.train.parallel.local_shards import see_local
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.vocab_parallel import split_vocabulary

MADE, TAKEN = 0, 1  # the dimensions of a weight: what its product makes and takes
# Along which dimension the parameters of each kind of block are cut; all others are whole on every rank.
CUTS: dict[type[nn.Module], dict[str, int]] = {
    Attention: {"q.weight": MADE, "k.weight": MADE, "v.weight": MADE, "o.weight": TAKEN},
    LatentAttention: {"q_up.weight": MADE, "kv_up.weight": MADE, "o.weight": TAKEN},
    GatedMlp: {"gate.weight": MADE, "up.weight": MADE, "down.weight": TAKEN},
    PlainMlp: {"up.weight": MADE, "down.weight": TAKEN},
    MambaMixer: {
        **dict.fromkeys(("inward.weight", "conv_weight", "conv_bias", "dt_bias", "a_log", "d", "norm.weight"), MADE),
        "outward.weight": TAKEN,
    },
}
Positions = Callable[[int, torch.device], Tensor]
ENDS = {"embedding.weight": MADE, "head.weight": MADE}


def split_tensors(part: Network, mesh: Mesh) -> None:
    """Cut the weights of a part over the ranks of tp, and have them exchange activations around its blocks."""
    if mesh.size("tp") == 1:
        return
    tp = mesh.sub("tp")
    split_vocabulary(part, tp)
    for block in part.modules():
        _exchange_around(block, tp)
    _spread_parameters(part, tp)
    part.positions = _of_all_pieces(part.positions, tp.size())


def _spread_parameters(part: Network, tp: DeviceMesh) -> None:
    """Every parameter becomes a DTensor; those that are have been dealt with, as parts of experts."""
    cuts = dict(ENDS)
    for path, module in part.named_modules():
        inside = next((inside for kind, inside in CUTS.items() if isinstance(module, kind)), {})
        cuts |= {f"{path}.{name}": dim for name, dim in inside.items()}
    for path, module in list(part.named_modules()):
        own = {n: p for n, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)}
        for name, parameter in own.items():
            cut = cuts.get(f"{path}.{name}")
            module.register_parameter(name, _spread(parameter, tp, Replicate() if cut is None else Shard(cut)))
        if own:
            see_local(module)


def _spread(parameter: nn.Parameter, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A parameter of the same shape without memory for its numbers, of which this rank has its part."""
    shape = list(parameter.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] //= tp.size()
    local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(DTensor.from_local(local, tp, [placement], run_check=False))


def _exchange_around(block: nn.Module, tp: DeviceMesh) -> None:
    """Gather what a block works on, add up what it makes."""
    if isinstance(block, GatedMlp | PlainMlp):
        along = 0  # it knows no sequences: pieces can lie one after the other, as they come
    elif isinstance(block, Attention | LatentAttention | MambaMixer):
        along = 1
    else:
        return
    if isinstance(block, LatentAttention):
        # Latents are narrower than the stream. That of keys and values is gathered with the rotated key beside it, and
        # normed by each rank for itself: of its heads only, so that the norm's gradients too are parts of a sum.
        for narrow in (block.q_norm, block.kv_down):
            narrow.register_forward_hook(lambda _module, _args, latent_BTR: gathered(latent_BTR, tp, along))
    else:
        block.register_forward_pre_hook(lambda _module, args: (gathered(args[0], tp, along), *args[1:]))
    block.register_forward_hook(lambda _module, _args, out: scattered_sum(out, tp, along))


def _of_all_pieces(positions: Positions, pieces: int) -> Positions:
    """Positions for a stream of which each rank has one piece, and the blocks all of them."""
    return lambda count, device: positions(count * pieces, device)
