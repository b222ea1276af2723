"""Tensors of a layer's parameter bucket, of any decoder that is trained out of core.

    layer_shapes(model)             # in the order in which they lie in the bucket: matrices, then vectors
    layer_param_shapes(model)       # the same by name, of a layer that autograd computes

A Llama layer has explicit backward and stacks the matrices that one GEMM takes (`llama_layer_shapes.py`). In any
other layer each parameter is a tensor of its own, named as in `llmb/models`; experts are stacked as there.
"""

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers, layer_weight_shapes

Shape = tuple[int, ...]


def layer_shapes(model: Model) -> tuple[Shape, ...]:
    """Return the shapes of a layer's tensors."""
    shapes = layer_weight_shapes(model) if has_llama_layers(model) else layer_param_shapes(model)
    return tuple(shapes.values())


def layer_param_shapes(model: Model) -> dict[str, Shape]:
    """Return the shape of each parameter by its name in a layer, those with weight decay first."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    outputs = {"q": width, "k": kv_width, "v": kv_width, "o": model.hidden}
    shapes: dict[str, Shape] = {f"attention.{name}.weight": (rows, model.hidden) for name, rows in outputs.items()}
    shapes["attention.o.weight"] = (model.hidden, width)
    shapes |= _mlp_shapes(model)
    biases = {"q": model.qkv_bias, "k": model.qkv_bias, "v": model.qkv_bias, "o": model.o_bias}
    shapes |= {f"attention.{name}_bias": (outputs[name],) for name, has_bias in biases.items() if has_bias}
    if model.qk_norm is not None:
        widths = (model.head_dim, model.head_dim) if model.qk_norm == "head" else (width, kv_width)
        shapes |= {f"attention.{name}_norm.weight": (size,) for name, size in zip("qk", widths, strict=True)}
    if model.attention_sinks:
        shapes["attention.sinks"] = (model.heads,)
    if model.experts is not None and model.experts.bias:
        shapes["mlp.router.logit_bias"] = (model.experts.count,)
    norms = ["attention_norm", "mlp_norm"] * model.pre_norms
    norms += ["attention_post_norm", "mlp_post_norm"] * model.post_norms
    return shapes | {f"{name}.weight": (model.hidden,) for name in norms}


def _mlp_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of a dense MLP, or those of experts, whose biases decay as well."""
    hidden, experts = model.hidden, model.experts
    if experts is None:
        inward, outward = (model.ffn, hidden), (hidden, model.ffn)
        return {"mlp.gate.weight": inward, "mlp.up.weight": inward, "mlp.down.weight": outward}
    outputs = {"gate": experts.ffn, "up": experts.ffn, "down": hidden}
    inputs = {"gate": hidden, "up": hidden, "down": experts.ffn}
    shapes: dict[str, Shape] = {"mlp.router.weight": (experts.count, hidden)}
    shapes |= {f"mlp.{name}.weight": (experts.count, rows, inputs[name]) for name, rows in outputs.items()}
    return shapes | {f"mlp.{name}.bias": (experts.count, rows) for name, rows in outputs.items() if experts.bias}
