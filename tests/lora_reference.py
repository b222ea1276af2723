"""LoRA by autograd and torch.optim.AdamW on merged weights W + scale * B A, to compare the trainer with."""

from dataclasses import replace

import torch
from reference_training import CPU, SEED, SMOOTH, lr, network_of, trainer_of
from torch import Tensor
from torch.func import functional_call

from llmb.config.model import Model
from llmb.config.native.lora_shapes import TARGETS
from llmb.config.offload_plan import Lora, Plan
from llmb.models.architectures import Network
from llmb.models.llama_layer.lora_adapters import LoraAdapters
from llmb.offload.bucket_params import param_slices
from llmb.offload.cuda_streams import Streams
from llmb.offload.lora.frozen_weights import StoredTensor, store_rows
from llmb.offload.trainer import Trainer
from llmb.ops.quant.channel_quant import ChannelFp8, quantize_channels_
from llmb.runtime.adamw_settings import BETAS, WEIGHT_DECAY
from llmb.runtime.synthetic_tokens import synthetic_tokens

LORA = Lora(rank=4, alpha=6.0, targets=TARGETS, frozen_weights="fp32")
MODULES = {
    "q_proj": "attention.q", "k_proj": "attention.k", "v_proj": "attention.v", "o_proj": "attention.o",
    "gate_proj": "mlp.gate", "up_proj": "mlp.up", "down_proj": "mlp.down",
}  # fmt: skip
Values = dict[str, Tensor]


def lora_plan(plan: Plan, lora: Lora = LORA) -> Plan:
    """Return a plan without gradients and state of buckets."""
    none = dict.fromkeys(("resident_grads", "resident_states", "grad_blocks", "state_blocks", "disk_states"), 0)
    return replace(plan, lora=lora, update_at="backward", **none)


def lora_trainer(
    model: Model, plan: Plan, clip: float | None = None, streams: Streams | None = None, device: torch.device = CPU
) -> Trainer:
    """Return a trainer with the weights of `network_of`, in fp8 if the plan says so, and initial adapters."""
    trainer = trainer_of(model, plan, clip, streams, device, initial=True)
    named = dict(network_of(model).named_parameters())
    for bucket in trainer.buckets:
        with trainer.edit_tensors(bucket) as tensors:
            for param in param_slices(model, bucket):
                store_rows(tensors[param.tensor], param.rows, named[param.name].detach()[param.source])
    return trainer


def random_adapters(adapters: LoraAdapters) -> Values:
    """Set adapters to values whose effect matters, and return them."""
    generator = torch.Generator().manual_seed(3)
    for tensor in adapters.named.values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return {name: tensor.float().clone() for name, tensor in adapters.named.items()}


def merged(network: Network, adapters: Values, scale: float) -> Values:
    """Return the weights by name, with the adapters' product added to those that have any."""
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    for name, a in adapters.items():
        stem, is_a = name[:-2], name.endswith(".A")
        if is_a:
            layer, projection = stem.rsplit(".", 1)
            weight = f"{layer}.{MODULES[projection]}.weight"
            weights[weight] = weights[weight] + scale * adapters[f"{stem}.B"] @ a
    return weights


def quantized(network: Network) -> Network:
    """Return the network with its matrices rounded to fp8, a scale for each row."""
    for parameter in network.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(_rounded(parameter.data))
    return network


def _rounded(weight: Tensor) -> Tensor:
    values = ChannelFp8(torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(len(weight)))
    quantize_channels_(weight, values)
    return values.values.float() * values.scales[:, None]


def train_reference_adapters(
    model: Model, plan: Plan, adapters: Values, steps: int, clip: float | None = None, network: Network | None = None
) -> tuple[list[float], list[float], Values, Values]:
    """Return losses, gradient norms, the gradients of the first step and the trained adapters."""
    assert plan.lora is not None
    network, scale = network_of(model) if network is None else network, plan.lora.scale
    params = {name: value.clone().requires_grad_() for name, value in adapters.items()}
    optimizer = torch.optim.AdamW(params.values(), betas=BETAS, eps=SMOOTH, weight_decay=WEIGHT_DECAY)
    losses, norms, first = [], [], {}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        tokens = synthetic_tokens(SEED, (step - 1) * plan.gbs, (plan.gbs, plan.seqlen + 1), model.vocab, CPU)
        loss = functional_call(network, merged(network, params, scale), (tokens[:, :-1], tokens[:, 1:]))
        loss.backward()
        first = first or {name: param.grad.clone() for name, param in params.items()}
        norm = torch.nn.utils.clip_grad_norm_(params.values(), torch.inf if clip is None else clip)
        optimizer.param_groups[0]["lr"] = lr(step)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, first, {name: param.detach() for name, param in params.items()}


def frozen_bits(trainer: Trainer) -> list[Tensor]:
    """Return copies of all frozen weights as bytes."""
    copies: list[Tensor] = []
    for bucket in trainer.buckets:
        with trainer.edit_tensors(bucket, write=False) as tensors:
            copies += [_bytes(tensor) for tensor in tensors]
    return copies


def _bytes(tensor: StoredTensor) -> Tensor:
    parts = tensor if isinstance(tensor, ChannelFp8) else (tensor,)
    return torch.cat([part.contiguous().flatten().view(torch.uint8).cpu() for part in parts])
