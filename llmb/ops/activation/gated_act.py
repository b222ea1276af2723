"""activation(gate) * up of a gated MLP in serving, of gate and up side by side, quantized for the next linear layer."""

from torch import Tensor

from llmb.ops.activation.activation import ACTIVATIONS
from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import Activation, QuantFormat, quantize_activation


@op
def gated_activation(gate_up_N2F: Tensor, activation: str, quant_format: QuantFormat) -> Activation:
    """Return activation(gate) * up in a quantization format; "silu" or "gelu", gate first along the channels."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    return quantize_activation.reference(ACTIVATIONS[activation](gate_NF) * up_NF, quant_format)
