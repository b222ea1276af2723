"""All-gather and reduce-scatter of flat tensors under their newest name: torch 2.13 warns about the ones of 2.11."""

import torch.distributed as dist

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
