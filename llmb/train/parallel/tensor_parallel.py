"""Tensor parallelism with sequence parallelism: sharded weights inside a block, residuals sharded along the sequence.

    apply_tensor_parallel(model_part, mesh)      # on the meta device; no effect with one rank

A block's first weights are column-parallel (heads, channels, Mamba groups) and its last weight is row-parallel, so each
rank computes a partial sum of the output. Every rank sees all tokens inside a block: the input is all-gathered and the
output reduce-scattered along the sequence. Norms, routers and everything token-wise between blocks sees only the rank's
shard of the sequence.

Shapes: B sequences, T tokens, C hidden width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmb.models.architectures import Network
from llmb.models.blocks import Attention, GatedMlp, PlainMlp
from llmb.models.mamba2 import MambaMixer
from llmb.models.mla import MLAAttention
from llmb.train.parallel.activation_collectives import all_gather, reduce_scatter
from llmb.train.parallel.mesh import REPLICAS, STAGE, Mesh
from llmb.train.parallel.parameter_shard import local_parameter
from llmb.train.parallel.vocab_parallel import apply_vocab_parallel

COLUMN, ROW = 0, 1  # sharded dimension of a weight [out, in] that is column-parallel or row-parallel
# The sharded dimension of the parameters of each kind of block; all others are replicated.
TP_PLAN: dict[type[nn.Module], dict[str, int]] = {
    Attention: {
        **dict.fromkeys(("q.weight", "k.weight", "v.weight", "q_bias", "k_bias", "v_bias", "sinks"), COLUMN),
        "o.weight": ROW,
    },
    MLAAttention: {"q_up.weight": COLUMN, "kv_up.weight": COLUMN, "o.weight": ROW},
    GatedMlp: {"gate.weight": COLUMN, "up.weight": COLUMN, "down.weight": ROW},
    PlainMlp: {"up.weight": COLUMN, "down.weight": ROW},
    MambaMixer: {
        **dict.fromkeys(("inward.weight", "conv_weight", "conv_bias", "dt_bias", "a_log", "d", "norm.weight"), COLUMN),
        "outward.weight": ROW,
    },
}
Positions = Callable[[int, torch.device], Tensor]
VOCAB_PLAN = {"embedding.weight": COLUMN, "head.weight": COLUMN}


def apply_tensor_parallel(model_part: Network, mesh: Mesh) -> None:
    """Shard the weights of a model part over tp, and add the collectives around its blocks."""
    if mesh.size("tp") == 1:
        return
    tp = mesh.submesh("tp")
    apply_vocab_parallel(model_part, tp)
    for block in model_part.modules():
        _add_collectives(block, tp)
    _shard_parameters(model_part, tp)
    model_part.positions = _gathered_positions(model_part.positions, tp.size())


def _shard_parameters(model_part: Network, tp: DeviceMesh) -> None:
    """Cut every parameter, except those of experts that are cut already; what is not cut is the same on all ranks."""
    plan = dict(VOCAB_PLAN)
    for path, module in model_part.named_modules():
        dims = next((dims for kind, dims in TP_PLAN.items() if isinstance(module, kind)), {})
        plan |= {f"{path}.{name}": dim for name, dim in dims.items()}
    for path, module in model_part.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if hasattr(parameter, "shard"):
                continue
            dim = plan.get(f"{path}.{name}")
            cuts = [] if dim is None else [(dim, tp.get_local_rank(), tp.size())]
            module.register_parameter(name, local_parameter(parameter, cuts, REPLICAS if cuts else STAGE))


def _add_collectives(block: nn.Module, tp: DeviceMesh) -> None:
    """All-gather the input of a block, reduce-scatter its output."""
    if isinstance(block, GatedMlp | PlainMlp):
        dim = 0  # token-wise: shards of sequences can be concatenated in rank order
    elif isinstance(block, Attention | MLAAttention | MambaMixer):
        dim = 1
    else:
        return
    if isinstance(block, MLAAttention):
        # Latents are smaller than the residual. The KV latent is gathered together with the RoPE key, and each rank
        # applies the norm for its heads only, so that the norm's gradients are partial sums as well.
        for latent in (block.q_norm, block.kv_down):
            latent.register_forward_hook(lambda _module, _args, latent_BTR: all_gather(latent_BTR, tp, dim))
    else:
        block.register_forward_pre_hook(lambda _module, args: (all_gather(args[0], tp, dim), *args[1:]))
    if isinstance(block, Attention):
        block.o_bias_scale = 1 / tp.size()  # partial outputs are summed
    block.register_forward_hook(lambda _module, _args, out: reduce_scatter(out, tp, dim))


def _gathered_positions(positions: Positions, ranks: int) -> Positions:
    """Return positions of the gathered sequence, given the number of tokens of one shard."""
    return lambda tokens, device: positions(tokens * ranks, device)
