"""Grok-1 against a plain reference of its own: no class in `transformers` computes it.

The reference below is written from the description of the published model, with loops over sequences, heads, tokens and
experts, and shares no code with the product but the shape of its weights.
"""

import math
from dataclasses import replace

import pytest
import torch
from hf_parity import assert_near
from small_models import grok1_model
from torch import Tensor

from llmb.config.model import Model, RopeConfig
from llmb.models.architectures import build_model
from llmb.models.grok1 import Grok1

TOLERANCE = 1e-4  # relative to the largest value of each tensor, fp32

SMALL = grok1_model(
    ffn=40, rope=RopeConfig(theta=10_000.0), embedding_scale=78.38367176906169, logit_scale=0.5773502691896257
)
MODELS = [
    SMALL,
    replace(SMALL, name="low-softcap", attn_logit_softcap=2.0),
    replace(SMALL, name="renormalised", experts=replace(SMALL.experts, renormalise=True, scale=1.5), post_norms=False),
    replace(SMALL, name="untied-head", tied_embeddings=False, kv_heads=4, norm_eps=1e-3),
]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def apply_rope(x_TD: Tensor, theta: float) -> Tensor:
    """Rotate each pair (i, i + D/2) as a complex number by position * theta ** (-2i / D)."""
    tokens, width = x_TD.shape
    half = width // 2
    pairs = torch.complex(x_TD[:, :half], x_TD[:, half:])
    angles = torch.tensor([[t * theta ** (-2 * i / width) for i in range(half)] for t in range(tokens)])
    out = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((out.real, out.imag), dim=-1)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x_TC: Tensor, weights: dict[str, Tensor], model: Model) -> Tensor:
    width, heads = model.head_dim, []
    for head in range(model.heads):
        shared = head // (model.heads // model.kv_heads)
        q = apply_rope(x_TC @ weights["attention.q.weight"][head * width : (head + 1) * width].T, model.rope.theta)
        k = apply_rope(x_TC @ weights["attention.k.weight"][shared * width : (shared + 1) * width].T, model.rope.theta)
        v = x_TC @ weights["attention.v.weight"][shared * width : (shared + 1) * width].T
        rows = []
        for t in range(len(x_TC)):
            logits = model.attn_logit_softcap * torch.tanh(
                k[: t + 1] @ q[t] / math.sqrt(width) / model.attn_logit_softcap
            )
            grown = torch.exp(logits - logits.max())
            rows.append((grown / grown.sum()) @ v[: t + 1])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ weights["attention.o.weight"].T


def moe(x_TC: Tensor, weights: dict[str, Tensor], model: Model) -> Tensor:
    rows = []
    for x in x_TC:
        logits = weights["mlp.router.weight"] @ x
        grown = torch.exp(logits - logits.max())
        probabilities = grown / grown.sum()
        best = sorted(range(model.experts.count), key=lambda e: -probabilities[e].item())[: model.experts.top_k]
        total = sum(probabilities[e] for e in best) if model.experts.renormalise else 1.0
        row = 0.0
        for e in best:
            gate, up, down = (weights[f"mlp.{matrix}.weight"][e] for matrix in ("gate", "up", "down"))
            row = row + model.experts.scale * probabilities[e] / total * (down @ (gelu(gate @ x) * (up @ x)))
        rows.append(row)
    return torch.stack(rows)


def reference_logits(tokens_BT: Tensor, weights: dict[str, Tensor], model: Model) -> Tensor:
    sequences = []
    for tokens_T in tokens_BT:
        x_TC = weights["embedding.weight"][tokens_T] * model.embedding_scale
        for index in range(model.layers):
            start = f"layers.{index}."
            inside = {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}
            added = attention(norm(x_TC, inside["attention_norm.weight"], model.norm_eps), inside, model)
            if model.post_norms:
                added = norm(added, inside["attention_post_norm.weight"], model.norm_eps)
            x_TC = x_TC + added
            added = moe(norm(x_TC, inside["mlp_norm.weight"], model.norm_eps), inside, model)
            if model.post_norms:
                added = norm(added, inside["mlp_post_norm.weight"], model.norm_eps)
            x_TC = x_TC + added
        head = weights["embedding.weight" if model.tied_embeddings else "head.weight"]
        sequences.append(norm(x_TC, weights["norm.weight"], model.norm_eps) @ head.T * model.logit_scale)
    return torch.stack(sequences)


def network_of(model: Model) -> Grok1:
    network = build_model(model)
    assert isinstance(network, Grok1)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():  # large enough that every part of the network matters, norms included
            parameter.normal_(0.0, 0.3, generator=generator).add_(parameter.ndim == 1)
        network.embedding.weight.mul_(0.05)
    return network


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_logits_loss_and_gradients_match(model: Model) -> None:
    network = network_of(model)
    weights = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    tokens = torch.randint(model.vocab, (2, 25), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    logits = reference_logits(inputs, weights, model)
    actual_logits = network(inputs)
    assert_near(actual_logits, logits, "logits", TOLERANCE)
    assert torch.equal(actual_logits.argmax(-1), logits.argmax(-1))
    likelihood = torch.log_softmax(logits, dim=-1)
    reference = -sum(likelihood[b, t, labels[b, t]] for b in range(2) for t in range(24)) / 48
    actual = network(inputs, labels)
    assert_near(actual, reference, "loss", TOLERANCE)

    reference.backward()
    actual.backward()
    for name, parameter in network.named_parameters():
        assert_near(parameter.grad, weights[name].grad, name, TOLERANCE)


def test_experts_have_a_hf_name_each(recipes) -> None:
    names = Grok1.hf_names(recipes["pretrain_grok1"].model("314b"))
    assert names["layers.3.mlp.down.weight"] == "model.layers.3.mlp.experts.{expert}.down_proj.weight"


def test_recipe_has_the_published_sizes(recipes) -> None:
    model = recipes["pretrain_grok1"].model("314b")
    assert model.embedding_scale == pytest.approx(math.sqrt(6144))
    assert model.logit_scale == pytest.approx(1 / math.sqrt(3))
    assert (model.attn_logit_softcap, model.activation, model.post_norms) == (30.0, "gelu", True)
    assert (model.tied_embeddings, model.experts.renormalise, model.rope.theta) == (True, False, 10_000.0)
