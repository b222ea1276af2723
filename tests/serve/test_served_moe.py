"""Served experts give what the network's experts give: in every format, on any number of ranks, in a whole Grok-1."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from steps import step_inputs
from torch import Tensor

from llmb.config.spec import Experts, Latent, Model, Rope
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.blocks import ACTIVATIONS
from llmb.models.moe import ExpertMlp
from llmb.ops.gemm.fp8_linear import E4M3, rounded
from llmb.ops.quant.nvfp4 import from_nvfp4, in_nvfp4
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import How, build_stack
from llmb.serve.layers.served_moe import ServedExperts
from llmb.serve.rank_groups import ALONE, ExpertGroup, Group, Ranks
from llmb.serve.step_batch import Inputs
from llmb.serve.weights.weight_source import Cut, RandomWeights

CPU, FP32 = torch.device("cpu"), torch.float32
GROK = Model(
    name="small grok",
    architecture="grok1",
    layers=2,
    hidden=32,
    ffn=40,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=61,
    activation="gelu",
    tied_embeddings=True,
    post_norms=True,
    rope=Rope(theta=10_000.0),
    attention_cap=30.0,
    embedding_scale=78.38367176906169,
    logit_scale=0.5773502691896257,
    experts=Experts(count=8, top_k=2, ffn=40, renormalise=False, aux_loss=0.01),
)
DEEPSEEK = replace(
    GROK,
    name="experts like deepseek's",
    activation="silu",
    experts=Experts(count=8, top_k=3, ffn=24, shared=1, groups=4, top_groups=2, score="sigmoid", scale=2.5),
)
WHOLE_DEEPSEEK = Model(
    name="small deepseek",
    architecture="deepseek",
    layers=3,
    hidden=48,
    ffn=80,
    heads=4,
    kv_heads=4,
    head_dim=16,
    vocab=61,
    experts=replace(DEEPSEEK.experts, dense_layers=1),
    latent=Latent(q_rank=24, kv_rank=20, nope_dim=16, rope_dim=8, value_dim=12),
)
WIDE = replace(DEEPSEEK, name="whole blocks", hidden=256, experts=replace(DEEPSEEK.experts, ffn=128, shared=0))


@dataclass
class Held:
    """The weights of a block that is there, as a served model takes them; notes what is in use while it gives more."""

    block: ExpertMlp
    given: list[weakref.ref] = field(default_factory=list)
    most_alive: int = 0

    def take(self, name: str, cut: Cut | None = None) -> Tensor:
        whole = self.block.state_dict()[name.removeprefix("mlp.")].clone()
        self.given = [one for one in self.given if one() is not None]
        if whole.dim() == 3:
            self.given.append(weakref.ref(whole))
            self.most_alive = max(self.most_alive, len(self.given))
        return whole if cut is None else cut.of(whole)


def block_of(model: Model) -> ExpertMlp:
    block, generator = ExpertMlp(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in block.state_dict().values():  # the router's correction too
            tensor.normal_(0.0, 0.2, generator=generator)
    return block


def served(
    block: ExpertMlp, model: Model, format: Format = "plain", group: ExpertGroup | None = None, shared: Group = ALONE
) -> ServedExperts:
    return ServedExperts(Held(block), "mlp", model, format, FP32, group or ExpertGroup(), shared)


def some(tokens: int, model: Model) -> Tensor:
    return torch.randn(tokens, model.hidden, generator=torch.Generator().manual_seed(6))


def step_of(tokens: int) -> Inputs:
    """Experts look at nothing of a step but which tokens have a place."""
    return step_inputs([(0, range(tokens), 0, tokens)], 1)


def assert_close(found: Tensor, wanted: Tensor, bound: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("model", [GROK, DEEPSEEK], ids=lambda model: model.name)
@pytest.mark.parametrize("tokens", [1, 3, 50])
@torch.no_grad
def test_they_are_the_networks_experts(model: Model, tokens: int) -> None:
    block, x_NC = block_of(model), some(tokens, model)
    assert_close(served(block, model)(x_NC, step_of(len(x_NC))), block(x_NC))


def test_a_step_without_tokens() -> None:
    assert served(block_of(DEEPSEEK), DEEPSEEK)(some(0, DEEPSEEK), step_of(0)).shape == (0, DEEPSEEK.hidden)


@torch.no_grad
def test_what_fills_up_a_step_visits_nobody() -> None:
    block, x_NC = block_of(DEEPSEEK), some(5, DEEPSEEK)
    mixer, inputs = served(block, DEEPSEEK), step_inputs([(0, (0,), 0, 1), (1, (1,), 0, 1)], 1, padding=3)
    assert inputs.places_N.tolist() == [0, 1, -1, -1, -1]
    _, chosen_NK = mixer.router(x_NC, inputs.places_N)
    assert (chosen_NK[2:] == -1).all()
    assert_close(mixer(x_NC, inputs)[:2], block(x_NC[:2]))


def in_pieces(x: Tensor, rows: int, columns: int) -> Tensor:
    """Rounded to e4m3 with a scale for each piece of so many rows and columns."""
    out = torch.empty_like(x)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            piece = (slice(top, top + rows), slice(left, left + columns))
            values, scale = rounded(x[piece], E4M3)
            out[piece] = values * scale
    return out


ROUNDED: dict[Format, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # of weights, of activations
    "fp8_tensor": (lambda w: in_pieces(w, 1 << 20, 1 << 20), lambda x: in_pieces(x, 1, 1 << 20)),
    "fp8_channel": (lambda w: in_pieces(w, 1, 1 << 20), lambda x: in_pieces(x, 1, 1 << 20)),
    "fp8_block": (lambda w: in_pieces(w, 128, 128), lambda x: in_pieces(x, 1, 128)),
    "nvfp4": (lambda w: from_nvfp4(in_nvfp4(w)), lambda x: x),
}


@pytest.mark.parametrize("format", ROUNDED)
@torch.no_grad
def test_formats_round_weights_and_what_meets_them(format: Format) -> None:
    block, x_NC = block_of(WIDE), some(5, WIDE)
    weight, read = ROUNDED[format]
    visits = zip(*block.router(x_NC), strict=True)
    wanted_NC = torch.zeros_like(x_NC)
    for token, (weights_K, chosen_K) in enumerate(visits):
        for factor, e in zip(weights_K, chosen_K.tolist(), strict=True):
            gate, up = (read(x_NC[token, None]) @ weight(one.weight[e]).T for one in (block.gate, block.up))
            hidden = read(ACTIVATIONS["silu"](gate) * up)
            wanted_NC[token] += factor * (hidden @ weight(block.down.weight[e]).T)[0]
    assert_close(served(block, WIDE, format)(x_NC, step_of(len(x_NC))), wanted_NC)


def test_a_width_of_no_whole_blocks_stays_plain() -> None:
    assert served(block_of(DEEPSEEK), DEEPSEEK, "fp8_block").both.form == "plain"
    assert served(block_of(WIDE), WIDE, "fp8_block").both.form == "groups8"
    halves = ExpertGroup(width=Group(0, 2))
    assert served(block_of(WIDE), WIDE, "fp8_block", halves).both.form == "plain"


@pytest.mark.parametrize(("size", "width"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("model", [GROK, DEEPSEEK], ids=lambda model: model.name)
@torch.no_grad
def test_ranks_add_up_to_the_whole(model: Model, size: int, width: int) -> None:
    block, x_NC = block_of(model), some(9, model)
    total_NC = torch.zeros_like(x_NC)
    for index in range(size):
        for part in range(width):
            group = ExpertGroup(index, size, Group(part, width))
            mixer = served(block, model, "plain", group, Group(index * width + part, size * width))
            assert mixer.both.values.numel() * size * width == 2 * block.gate.weight.numel()
            total_NC += mixer(x_NC, step_of(len(x_NC)))
    assert_close(total_NC, block(x_NC))


@dataclass(frozen=True)
class Travelling(ExpertGroup):
    """Two ranks with tokens of their own, of which this one is played: the other's are known."""

    others_NC: Tensor = field(default_factory=lambda: torch.empty(0))
    sums: list[Tensor] = field(default_factory=list)  # of each rank that has been played

    def spread(self, x_NC: Tensor) -> Tensor:
        return torch.cat((x_NC, self.others_NC) if self.index == 0 else (self.others_NC, x_NC))

    def collect(self, partial_NC: Tensor) -> Tensor:
        self.sums.append(partial_NC)
        mine = len(partial_NC) - len(self.others_NC)
        return partial_NC[:mine] if self.index == 0 else partial_NC[-mine:]


@torch.no_grad
def test_tokens_travel_to_the_experts_and_shared_experts_stay() -> None:
    block, xs = block_of(DEEPSEEK), some(7, DEEPSEEK).split([3, 4])
    groups = [Travelling(index, 2, others_NC=xs[1 - index]) for index in range(2)]
    alone = [served(block, DEEPSEEK, "plain", groups[index])(xs[index], step_of(len(xs[index]))) for index in range(2)]
    routed_NC = groups[0].sums[0] + groups[1].sums[0]
    assert block.shared is not None
    assert_close(routed_NC + block.shared(torch.cat(xs)), block(torch.cat(xs)))
    assert_close(alone[1] - groups[1].sums[0][3:], block.shared(xs[1]))


def test_one_unrounded_matrix_at_a_time() -> None:
    weights = Held(block_of(WIDE))
    ServedExperts(weights, "mlp", WIDE, "fp8_block", FP32, ExpertGroup(), ALONE)
    assert weights.most_alive == 1


def test_shares_must_be_equal() -> None:
    block = block_of(GROK)
    with pytest.raises(ConfigError, match="8 experts cannot be dealt evenly to 3 ranks"):
        served(block, GROK, "plain", ExpertGroup(0, 3))
    with pytest.raises(ConfigError, match="experts of width 40 cannot be cut in 3"):
        served(block, GROK, "plain", ExpertGroup(width=Group(0, 3)))


@pytest.mark.parametrize("model", [GROK, WHOLE_DEEPSEEK], ids=lambda model: model.name)
@torch.no_grad
def test_a_whole_model(model: Model) -> None:
    network = build_model(model)
    network.init_weights(3)
    stack = build_stack(model, RandomWeights(model, 3, FP32, CPU), How(FP32, "plain", FP32), Ranks(CPU))
    for mixer in stack.mixers():
        mixer.allocate(8, 4, 2, CPU)
    tokens_BT = torch.randint(model.vocab, (1, 19), generator=torch.Generator().manual_seed(7))
    found = []
    for start, end, padding in ((0, 11, 0), (11, 12, 3), (12, 19, 0)):
        inputs = step_inputs([(1, (5, 2, 7, 0, 3), start, end - start)], 4, padding)
        step_tokens = torch.cat((tokens_BT[0, start:end], torch.zeros(padding, dtype=torch.int64)))
        x_NC = stack.through(stack.embed(step_tokens), inputs)
        found.append(stack.logits(x_NC, torch.arange(end - start)))
    assert_close(torch.cat(found), network(tokens_BT)[0])
