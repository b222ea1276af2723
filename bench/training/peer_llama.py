"""transformers' Llama as a peer trains it: random weights in bf16, with its loss, and with Liger-Kernel's kernels.

Liger-Kernel brings RMSNorm, RoPE, SwiGLU and a loss fused with the head; without it the loss is transformers' own, of
all logits at once, or one in chunks of 2,048 tokens. Attention is torch's choice of scaled-dot-product kernels.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Loss = Literal["fused", "whole", "chunked"]
LOSS_TOKENS = 2048
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip


class WithLoss(torch.nn.Module):
    """A model whose result is its mean loss."""

    def __init__(self, llama: LlamaForCausalLM, loss: Loss):
        super().__init__()
        self.llama = llama
        self.how = loss

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        if self.how != "chunked":
            return self.llama(input_ids=tokens_BT, labels=tokens_BT).loss  # which it shifts itself
        hidden_ND = self.llama.model(input_ids=tokens_BT).last_hidden_state.flatten(0, 1)
        parts = zip(hidden_ND.split(LOSS_TOKENS), labels_BT.flatten().split(LOSS_TOKENS), strict=True)
        summed = [checkpoint(self.loss, x_ND, labels_N, use_reentrant=False) for x_ND, labels_N in parts]
        return torch.stack(summed).sum() / labels_BT.numel()

    def loss(self, x_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.llama.lm_head(x_ND).float(), labels_N, reduction="sum")


def shaped(tiny: bool, seqlen: int, loss: Loss) -> WithLoss:
    """Llama 8B or a very small one, without memory for its weights."""
    config = LlamaConfig(
        **(TINY if tiny else SHAPE), max_position_embeddings=seqlen,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5}, attn_implementation="sdpa", use_cache=False,
        dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        return WithLoss(LlamaForCausalLM(config).to(torch.bfloat16), loss)


def filled(network: WithLoss, home: torch.device, device: torch.device) -> WithLoss:
    """Its weights, which live at home, drawn where it computes."""
    network.to_empty(device=home)
    with device:
        network.llama.model.rotary_emb = LlamaRotaryEmbedding(network.llama.config)  # its table was not computed yet
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            drawn = torch.randn(local.shape, device=device, dtype=local.dtype) * 0.02
            local.copy_(drawn if local.ndim > 1 else torch.ones_like(drawn))
    return network.train()


def apply_liger(device: torch.device) -> bool:
    """Whether there is one; its kernels are for GPUs."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        return False
    if device.type != "cuda":
        return False
    apply_liger_kernel_to_llama()
    return True
