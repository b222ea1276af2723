"""bf16 and fp8 compute: master weights, gradients and updates stay fp32."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from sharded_network import BF16, ONE, shard
from small_models import SMALL_MODELS, llama_model
from torch import nn

from llmb.errors import ConfigError
from llmb.models.architectures import Network, build_model
from llmb.models.blocks import Attention, GatedMlp
from llmb.models.moe import GroupedLinear, Router
from llmb.ops import device_capabilities
from llmb.ops.device_capabilities import DeviceCapabilities
from llmb.ops.gemm.fp8_linear import OperandNames, fp8_linear
from llmb.ops.moe import fp8_grouped_gemm
from llmb.ops.quant.delayed_scaling import SCALINGS, CurrentScaling, DelayedScaling
from llmb.ops.quant.group_quant import Fp8WeightCache
from llmb.runtime.adamw_settings import BETAS
from llmb.train import parallelize, precision
from llmb.train.module_class import use_class
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.precision import (
    CastLinear,
    Fp8GroupedLinear,
    Fp8Linear,
    FusedEmbedding,
    FusedGatedMlp,
    FusedQkvAttention,
    check_fp8_device,
    compute_in_bf16,
    compute_in_fp8,
    fp8_grouped_linears,
    operand_names,
)

CPU = torch.device("cpu")
DELAYED = partial(DelayedScaling, device=CPU)
MODEL = llama_model(name="small", hidden=64, ffn=128, vocab=128)


def classes(network: nn.Module, kind: type[nn.Module]) -> set[type]:
    """Return the classes of a kind of modules."""
    return {type(module) for module in network.modules() if isinstance(module, kind)}


@pytest.fixture
def exact_and_rounded() -> tuple:
    """Return networks of the same weights that compute in fp32 and in bf16, after one backward pass."""
    exact = build_model(MODEL)
    exact.init_weights(2)
    rounded = copy.deepcopy(exact)
    compute_in_bf16(rounded)
    shard(rounded, BF16)
    tokens = torch.randint(MODEL.vocab, (2, 65), generator=torch.Generator().manual_seed(3))
    for network in (exact, rounded):
        network(tokens[:, :-1], tokens[:, 1:]).backward()
    return exact, rounded


def update(network: Network, lr: float) -> tuple[Optimizer, torch.Tensor]:
    """Update the weights; return the optimizer and the gradients' norm."""
    sharded_parameters(network).end_step()
    optimizer = Optimizer([sharded_parameters(network)], ONE)
    return optimizer, optimizer.update(lr)


def test_gemms_are_bf16_and_gradients_fp32(exact_and_rounded) -> None:
    exact, rounded = exact_and_rounded
    assert classes(rounded, nn.Linear) == {CastLinear}
    assert classes(rounded, nn.Embedding) == {FusedEmbedding}
    assert classes(rounded, GatedMlp) == {FusedGatedMlp}
    assert classes(rounded, Attention) == {FusedQkvAttention}
    assert rounded(torch.arange(5)[None]).dtype == torch.bfloat16
    expected = dict(exact.named_parameters())
    assert expected.keys() == dict(rounded.named_parameters()).keys()
    for name, parameter in rounded.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.ndim > 1 else torch.float32)
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert 0 < error < 0.03, f"{name}: {error:.3f}"


def test_gradient_clipping_returns_norm_before_clipping(exact_and_rounded) -> None:
    _, rounded = exact_and_rounded
    for parameter in rounded.parameters():
        parameter.grad.mul_(1000)
    expected = torch.cat([p.grad.flatten().double() for p in rounded.parameters()]).norm()
    optimizer, norm = update(rounded, 0.1)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    state = [*optimizer.bucket_state(), *optimizer.replicated_state()]
    clipped = torch.cat([m.flatten() / (1 - BETAS[0]) for _, kind, m in state if kind == "exp_avg"])
    assert clipped.norm().item() == pytest.approx(1.0, rel=1e-3)
    assert all(p.grad is None for p in rounded.parameters())


@pytest.mark.parametrize("recipe", SCALINGS)
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_fp8_is_used_in_layers_only(name: str, recipe: str, monkeypatch) -> None:
    network = build_model(SMALL_MODELS[name])
    network.init_weights(1)
    in_bf16 = copy.deepcopy(network)
    compute_in_bf16(in_bf16)
    compute_in_fp8(network, partial(SCALINGS[recipe], device=CPU))
    assert classes(network.layers, nn.Linear) == {Fp8Linear}
    experts = {Fp8GroupedLinear} if SMALL_MODELS[name].experts is not None else set()
    assert classes(network.layers, GroupedLinear) == experts
    assert type(network.embedding) is FusedEmbedding
    assert network.head is None or type(network.head) is CastLinear

    rounded: list[torch.dtype] = []
    for format in ("fp8_linear", "fp8_grouped_gemm"):
        original = getattr(precision, format)
        counted = lambda x, *args, original=original: (rounded.append(x.dtype), original(x, *args))[1]  # noqa: E731
        monkeypatch.setattr(precision, format, counted)
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(2))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (network, in_bf16)]
    layers = [m for m in network.layers.modules() if isinstance(m, nn.Linear | GroupedLinear)]
    assert rounded == [torch.bfloat16] * len([m for m in layers if all(n % 16 == 0 for n in m.weight.shape[-2:])])
    for loss in losses:
        loss.backward()
    assert losses[0].item() != losses[1].item()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.01)
    for parameter in network.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


def test_unsupported_fp8_sizes_compute_in_bf16() -> None:
    x, names = torch.randn(2, 16, 40, dtype=torch.bfloat16), OperandNames("x", "weight", "dy")
    scaling = CurrentScaling(names.dtypes, CPU)
    for inputs, outputs, fits in ((40, 32, False), (32, 40, False), (32, 32, True)):
        layer = nn.Linear(inputs, outputs, bias=False)
        use_class(layer, Fp8Linear, scaling=scaling, operands=names)
        x_in = x[..., :inputs].contiguous()
        in_bf16 = nn.functional.linear(x_in, layer.weight.bfloat16())
        assert torch.equal(layer(x_in), fp8_linear(x_in, layer.weight, scaling, names) if fits else in_bf16)
    odd = x[:, :15, :32].contiguous()
    assert torch.equal(layer(odd), nn.functional.linear(odd, layer.weight.bfloat16()))


@pytest.mark.parametrize("fp8_fast_accum", [False, True])
def test_fast_accumulation_of_expert_gemms(monkeypatch, fp8_fast_accum: bool) -> None:
    network = build_model(SMALL_MODELS["grok1"])
    network.init_weights(1)
    compute_in_fp8(network, DELAYED, fp8_fast_accum=fp8_fast_accum)
    calls: dict[str, list[bool]] = {"_matmul": [], "_outer": []}

    def recorded(name: str) -> Callable[..., torch.Tensor]:
        real = getattr(fp8_grouped_gemm, name)
        return lambda *args, fast: (calls[name].append(fast), real(*args, fast=fast))[1]

    for name in calls:
        monkeypatch.setattr(fp8_grouped_gemm, name, recorded(name))
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(2))
    network(tokens[:, :-1], tokens[:, 1:]).backward()
    layers = len(fp8_grouped_linears(network))
    assert calls == {"_matmul": layers * [True] + layers * [fp8_fast_accum], "_outer": layers * [fp8_fast_accum]}


def test_names_of_fp8_tensors_are_those_of_the_whole_model() -> None:
    """A pipeline stage keeps the names of its layers; layers that read one activation share its name."""
    names = operand_names(build_model(SMALL_MODELS["deepseek"]))
    last = max(int(path.split(".")[1]) for path in names)
    attention = f"layers.{last}.attention"
    assert names[f"{attention}.kv_down"].x == names[f"{attention}.q_down"].x == f"{attention}.q_down.x"
    assert names[f"{attention}.kv_down"][1:] == (f"{attention}.kv_down.weight", f"{attention}.kv_down.dy")
    assert names[f"layers.{last}.mlp.shared.up"].x == f"layers.{last}.mlp.shared.gate.x"
    assert names[f"layers.{last}.mlp.shared.down"].x == f"layers.{last}.mlp.shared.down.x"
    stage = build_model(SMALL_MODELS["deepseek"])
    stage.layers = nn.ModuleList()
    stage.layers.add_module(str(last), build_model(SMALL_MODELS["deepseek"]).layers[last])
    assert operand_names(stage).items() == {item for item in names.items() if item[0].startswith(f"layers.{last}.")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "ga", "recipes"),
    [
        ("llama", 24, 2, [*SCALINGS, "rowwise"]),
        ("nemotron_h", 24, 1, SCALINGS),
        ("grok1", 24, 1, ["tensorwise_delayed"]),
        pytest.param("grok1", 24, 1, ["tensorwise_current"], marks=pytest.mark.nightly),
        ("deepseek", 20, 1, ["tensorwise_current"]),
        pytest.param("deepseek", 20, 1, ["tensorwise_delayed"], marks=pytest.mark.nightly),
    ],
)
def test_every_dtype_and_recipe_trains_as_fp32(trained, name: str, steps: int, ga: int, recipes: list[str]) -> None:
    """Gradients accumulate in one model; in all of them by `test_layout_training.py`."""
    run = {"model": SMALL_MODELS[name], "steps": steps, "mbs": 4 // ga, "ga": ga, "lr": 5e-3}
    fp32 = trained(dtype="fp32", **run).losses()
    assert sum(fp32[-10:]) / 10 < fp32[0] - 0.3, "there is something to learn"
    for dtype, recipe in (("bf16", None), *(("fp8", recipe) for recipe in recipes)):
        losses = trained(dtype=dtype, fp8_recipe=recipe, **run).losses()
        assert losses != fp32
        assert losses[0] == pytest.approx(fp32[0], rel=1e-3)
        # Rounding moves some tokens of DeepSeek to other experts.
        assert losses[:12] == pytest.approx(fp32[:12], rel=0.02 if dtype == "fp8" or name == "deepseek" else 5e-3)
        assert sum(losses[-10:]) == pytest.approx(sum(fp32[-10:]), rel=0.01)


@pytest.mark.slow
def test_fp8_weights_cached_for_a_step_are_bit_exact(trained, monkeypatch) -> None:
    """Updates of shards do not bump the versions of weights; our optimizer does, so that caches are refreshed."""
    caches, get = [], Fp8WeightCache.get
    monkeypatch.setattr(
        Fp8WeightCache, "get", lambda cache, *args, **kw: (caches.append(cache), get(cache, *args, **kw))[1]
    )
    run = {"model": SMALL_MODELS["grok1"], "dtype": "fp8", "steps": 4, "ga": 2, "gbs": 4, "mbs": 2}
    losses = trained(**run).losses()
    assert caches
    monkeypatch.setattr(parallelize, "cache_fp8_weights", lambda *_: None)
    assert trained(**run).losses() == losses


def test_routers_stay_in_fp32() -> None:
    network = build_model(SMALL_MODELS["deepseek"])
    compute_in_fp8(network, DELAYED)
    router = next(module for module in network.modules() if isinstance(module, Router))
    nn.init.normal_(router.weight)
    x = torch.randn(16, 32).bfloat16()
    weights, experts_used = router(x)
    plain = (x.float() @ router.weight.T).sigmoid().gather(1, experts_used)
    assert torch.equal(weights, plain / plain.sum(dim=1, keepdim=True))


def test_balanced_experts(trained) -> None:
    balanced = trained(model=SMALL_MODELS["grok1"], balanced_experts=True)
    assert balanced.ended().status == "ok"
    assert balanced.losses() != trained(model=SMALL_MODELS["grok1"]).losses()


def test_experts_can_stay_in_bf16() -> None:
    network = build_model(SMALL_MODELS["grok1"])
    compute_in_fp8(network, DELAYED, fp8_experts=False)
    assert not fp8_grouped_linears(network)
    assert classes(network.layers, nn.Linear) == {Fp8Linear}


def test_fp8_experts_need_hopper(monkeypatch) -> None:
    for module in (precision, device_capabilities):
        monkeypatch.setattr(module, "capabilities", lambda _device: DeviceCapabilities(compute=(10, 0)))
    check_fp8_device(build_model(MODEL), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"experts needs a GPU of compute capability 9\.0 .* this one has 10\.0"):
        check_fp8_device(build_model(SMALL_MODELS["grok1"]), torch.device("cuda"))
    check_fp8_device(build_model(SMALL_MODELS["grok1"]), torch.device("cuda"), fp8_experts=False)
