"""Served MoE equals the network's: in every format, on any number of ranks, in a whole Grok-1."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from small_models import deepseek_model, grok1_model
from step_inputs import step_inputs
from torch import Tensor

from llmb.config.model import Model, MoEConfig, RopeConfig
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.moe import MoE
from llmb.ops.activation.activation import ACTIVATIONS
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import fake_quantize
from llmb.ops.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import ServingDtypes, build_served_model
from llmb.serve.layers.served_moe import ServedMoe
from llmb.serve.rank_groups import SINGLE_RANK, ExpertGroup, RankGroup, RankGroups
from llmb.serve.step_batch import StepInputs
from llmb.serve.weights.weight_source import RandomWeights, WeightShard

CPU, FP32 = torch.device("cpu"), torch.float32
GROK = grok1_model(
    name="small grok",
    ffn=40,
    rope=RopeConfig(theta=10_000.0),
    embedding_scale=78.38367176906169,
    logit_scale=0.5773502691896257,
    experts=MoEConfig(count=8, top_k=2, ffn=40, renormalise=False, aux_loss=0.01),
)
DEEPSEEK = replace(
    GROK,
    name="experts like deepseek's",
    activation="silu",
    experts=MoEConfig(count=8, top_k=3, ffn=24, shared=1, groups=4, top_groups=2, score="sigmoid", scale=2.5),
)
WHOLE_DEEPSEEK = deepseek_model(
    layers=3, hidden=48, ffn=80, head_dim=16, experts=replace(DEEPSEEK.experts, dense_layers=1)
)
WIDE = replace(DEEPSEEK, name="whole blocks", hidden=256, experts=replace(DEEPSEEK.experts, ffn=128, shared=0))


@dataclass
class BlockWeights:
    """Weight source of an existing block; records how many of its tensors are alive at once."""

    block: MoE
    alive: list[weakref.ref] = field(default_factory=list)
    most_alive: int = 0

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        whole = self.block.state_dict()[name.removeprefix("mlp.")].clone()
        self.alive = [ref for ref in self.alive if ref() is not None]
        if whole.dim() == 3:
            self.alive.append(weakref.ref(whole))
            self.most_alive = max(self.most_alive, len(self.alive))
        return whole if shard is None else shard.slice(whole)


def block_of(model: Model) -> MoE:
    block, generator = MoE(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in block.state_dict().values():  # including the router's correction bias
            tensor.normal_(0.0, 0.2, generator=generator)
    return block


def served(
    block: MoE,
    model: Model,
    format: Format = "plain",
    group: ExpertGroup | None = None,
    shared: RankGroup = SINGLE_RANK,
) -> ServedMoe:
    return ServedMoe(BlockWeights(block), "mlp", model, format, FP32, group or ExpertGroup(), shared)


def some(tokens: int, model: Model) -> Tensor:
    return torch.randn(tokens, model.hidden, generator=torch.Generator().manual_seed(6))


def step_of(tokens: int) -> StepInputs:
    """Return the inputs of a step; experts only use its slot mapping."""
    return step_inputs([(0, range(tokens), 0, tokens)], 1)


def assert_close(actual: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("model", [GROK, DEEPSEEK], ids=lambda model: model.name)
@pytest.mark.parametrize("tokens", [1, 3, 50])
@torch.no_grad
def test_served_moe_equals_the_network(model: Model, tokens: int) -> None:
    block, x_NC = block_of(model), some(tokens, model)
    assert_close(served(block, model)(x_NC, step_of(len(x_NC))), block(x_NC))


def test_empty_step() -> None:
    assert served(block_of(DEEPSEEK), DEEPSEEK)(some(0, DEEPSEEK), step_of(0)).shape == (0, DEEPSEEK.hidden)


@torch.no_grad
def test_padding_is_not_routed() -> None:
    block, x_NC = block_of(DEEPSEEK), some(5, DEEPSEEK)
    mixer, inputs = served(block, DEEPSEEK), step_inputs([(0, (0,), 0, 1), (1, (1,), 0, 1)], 1, padding=3)
    assert inputs.slot_mapping_N.tolist() == [0, 1, -1, -1, -1]
    _, topk_ids_NK = mixer.router(x_NC, inputs.slot_mapping_N)
    assert (topk_ids_NK[2:] == -1).all()
    assert_close(mixer(x_NC, inputs)[:2], block(x_NC[:2]))


def quantize_in_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Quantize to e4m3 with a scale for each block of so many rows and columns."""
    out = torch.empty_like(x)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            chunk = (slice(top, top + rows), slice(left, left + columns))
            values, scale = fake_quantize(x[chunk], E4M3)
            out[chunk] = values * scale
    return out


ROUNDED: dict[Format, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # of weights, of activations
    "fp8_tensor": (lambda w: quantize_in_blocks(w, 1 << 20, 1 << 20), lambda x: quantize_in_blocks(x, 1, 1 << 20)),
    "fp8_channel": (lambda w: quantize_in_blocks(w, 1, 1 << 20), lambda x: quantize_in_blocks(x, 1, 1 << 20)),
    "fp8_block": (lambda w: quantize_in_blocks(w, 128, 128), lambda x: quantize_in_blocks(x, 1, 128)),
    "nvfp4": (lambda w: dequantize_nvfp4(quantize_nvfp4(w)), lambda x: x),
}


@pytest.mark.parametrize("format", ROUNDED)
@torch.no_grad
def test_formats_quantize_weights_and_activations(format: Format) -> None:
    block, x_NC = block_of(WIDE), some(5, WIDE)
    weight, read = ROUNDED[format]
    routed = zip(*block.router(x_NC), strict=True)
    expected_NC = torch.zeros_like(x_NC)
    for token, (weights_K, chosen_K) in enumerate(routed):
        for factor, e in zip(weights_K, chosen_K.tolist(), strict=True):
            gate, up = (read(x_NC[token, None]) @ weight(matrix.weight[e]).T for matrix in (block.gate, block.up))
            hidden = read(ACTIVATIONS["silu"](gate) * up)
            expected_NC[token] += factor * (hidden @ weight(block.down.weight[e]).T)[0]
    assert_close(served(block, WIDE, format)(x_NC, step_of(len(x_NC))), expected_NC)


def test_width_of_partial_blocks_stays_plain() -> None:
    assert served(block_of(DEEPSEEK), DEEPSEEK, "fp8_block").gate_up.quant_format == "plain"
    assert served(block_of(WIDE), WIDE, "fp8_block").gate_up.quant_format == "1x128"
    halves = ExpertGroup(tp=RankGroup(0, 2))
    assert served(block_of(WIDE), WIDE, "fp8_block", halves).gate_up.quant_format == "plain"


def test_width_of_partial_swizzled_groups_stays_plain() -> None:
    narrow = replace(WIDE, name="whole groups of 16 only", experts=replace(WIDE.experts, ffn=48))
    assert served(block_of(WIDE), WIDE, "nvfp4").gate_up.format == "nvfp4"
    assert served(block_of(narrow), narrow, "nvfp4").gate_up.format == "plain"


@pytest.mark.parametrize(("size", "width"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("model", [GROK, DEEPSEEK], ids=lambda model: model.name)
@torch.no_grad
def test_expert_shards_sum_to_the_whole(model: Model, size: int, width: int) -> None:
    block, x_NC = block_of(model), some(9, model)
    total_NC = torch.zeros_like(x_NC)
    for index in range(size):
        for part in range(width):
            group = ExpertGroup(index, size, RankGroup(part, width))
            mixer = served(block, model, "plain", group, RankGroup(index * width + part, size * width))
            assert mixer.gate_up.values.numel() * size * width == 2 * block.gate.weight.numel()
            total_NC += mixer(x_NC, step_of(len(x_NC)))
    assert_close(total_NC, block(x_NC))


@dataclass(frozen=True)
class FakeDataParallelExperts(ExpertGroup):
    """One of two data-parallel ranks, with the tokens of the other given."""

    others_NC: Tensor = field(default_factory=lambda: torch.empty(0))
    sums: list[Tensor] = field(default_factory=list)  # of each rank

    def dispatch(self, x_NC: Tensor) -> Tensor:
        return torch.cat((x_NC, self.others_NC) if self.index == 0 else (self.others_NC, x_NC))

    def combine(self, partial_NC: Tensor) -> Tensor:
        self.sums.append(partial_NC)
        mine = len(partial_NC) - len(self.others_NC)
        return partial_NC[:mine] if self.index == 0 else partial_NC[-mine:]


@torch.no_grad
def test_dispatch_with_local_shared_experts() -> None:
    block, xs = block_of(DEEPSEEK), some(7, DEEPSEEK).split([3, 4])
    groups = [FakeDataParallelExperts(index, 2, others_NC=xs[1 - index]) for index in range(2)]
    outputs = [
        served(block, DEEPSEEK, "plain", groups[index])(xs[index], step_of(len(xs[index]))) for index in range(2)
    ]
    routed_NC = groups[0].sums[0] + groups[1].sums[0]
    assert block.shared is not None
    assert_close(routed_NC + block.shared(torch.cat(xs)), block(torch.cat(xs)))
    assert_close(outputs[1] - groups[1].sums[0][3:], block.shared(xs[1]))


def test_one_unquantized_matrix_at_a_time() -> None:
    weights = BlockWeights(block_of(WIDE))
    ServedMoe(weights, "mlp", WIDE, "fp8_block", FP32, ExpertGroup(), SINGLE_RANK)
    assert weights.most_alive == 1


def test_unequal_shards_are_refused() -> None:
    block = block_of(GROK)
    with pytest.raises(ConfigError, match="8 experts cannot be split evenly over 3 ranks"):
        served(block, GROK, "plain", ExpertGroup(0, 3))
    with pytest.raises(ConfigError, match="experts of width 40 cannot be split over 3 ranks"):
        served(block, GROK, "plain", ExpertGroup(tp=RankGroup(0, 3)))


@pytest.mark.parametrize("model", [GROK, WHOLE_DEEPSEEK], ids=lambda model: model.name)
@torch.no_grad
def test_whole_model_equals_the_network(model: Model) -> None:
    network = build_model(model)
    network.init_weights(3)
    served_model = build_served_model(
        model, RandomWeights(model, 3, FP32, CPU), ServingDtypes(FP32, "plain", FP32), RankGroups(CPU)
    )
    for mixer in served_model.mixers():
        mixer.allocate(8, 4, 2, CPU)
    tokens_BT = torch.randint(model.vocab, (1, 19), generator=torch.Generator().manual_seed(7))
    actual = []
    for start, end, padding in ((0, 11, 0), (11, 12, 3), (12, 19, 0)):
        inputs = step_inputs([(1, (5, 2, 7, 0, 3), start, end - start)], 4, padding)
        step_tokens = torch.cat((tokens_BT[0, start:end], torch.zeros(padding, dtype=torch.int64)))
        x_NC = served_model.forward(served_model.embed(step_tokens), inputs)
        actual.append(served_model.logits(x_NC, torch.arange(end - start)))
    assert_close(torch.cat(actual), network(tokens_BT)[0])
