"""Split of a network into pipeline stages, which `pipeline.py` runs.

    model_parts = build_stages(network, mesh)      # before any other pass over the network

Rank r of pp has the stages r, r + pp, r + 2 pp and so on (`parallel_layout.stage_layers`), each a decoder with only the
layers of that stage, under their names in the full network. The first stage has the embedding, the last one the norm,
the head and the loss.

With tied embeddings, the first and the last stage hold a copy of the matrix each.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from llmb.config.parallel_layout import stage_layers
from llmb.config.spec import RunConfig, Training
from llmb.models.architectures import Network
from llmb.train.parallel.mesh import Mesh

TIED = "embedding.weight"


def build_stages(network: Network, mesh: Mesh) -> list[Network]:
    """Return this rank's model parts, one for each of its stages, first to last; the network is consumed."""
    pp = mesh.size("pp")
    if pp == 1:
        return [network]
    layers, network.layers = list(network.layers), nn.ModuleList()  # a network without layers is cheap to copy
    stages = stage_layers(len(layers), pp, mesh.parallel.vp)
    model_parts = []
    for stage in range(mesh.index("pp"), len(stages), pp):
        model_part = deepcopy(network)
        for index in stages[stage]:
            model_part.layers.add_module(str(index), layers[index])
        _drop_unused_ends(model_part, first=stage == 0, last=stage == len(stages) - 1)
        model_parts.append(model_part)
    return model_parts


def _drop_unused_ends(model_part: Network, first: bool, last: bool) -> None:
    """Drop embedding, norm and head unless this stage uses them."""
    model_part.first, model_part.last = first, last
    if not first and not (last and model_part.model.tied_embeddings):
        model_part.embedding = None
    if not last:
        model_part.norm = model_part.head = None


def tied_copies(model_parts: list[Network]) -> set[str]:
    """Return the names of tied weights whose other copy, on an earlier stage, counts in the gradient norm."""
    last = model_parts[-1]
    return {TIED} if last.last and not last.first and last.model.tied_embeddings else set()


def stage_boundary_tensor(config: RunConfig, workload: Training, mesh: Mesh) -> Tensor:
    """Return the residual between two stages, on the meta device."""
    shape = (workload.mbs, workload.seqlen // mesh.size("cp") // mesh.size("tp"), config.model.hidden)
    dtype = torch.float32 if config.precision.dtype == "fp32" else torch.bfloat16
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
