"""Reports of the first non-finite tensor, and advice on out-of-memory errors."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_changes import changed
from nightly_cases import by_turns
from sharded_network import shard
from small_config import CONFIG
from small_models import SMALL_MODELS, llama_model
from torch import nn
from training_ranks import on_ranks

from llmb.config.spec import Machine
from llmb.models.architectures import build_model
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.run_ending import Diverged
from llmb.train import loop
from llmb.train.nonfinite import find_first_nonfinite
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.train_oom import advice

EIGHT_BILLION = llama_model(name="8b", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
ON_H200 = changed(
    replace(CONFIG, model=EIGHT_BILLION, machine=Machine(gpu="h200", gpus=1, gpus_per_node=8)),
    dtype="bf16",
    seqlen=8192,
)


class NanGradient(torch.autograd.Function):
    """Identity with a NaN gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


Spoil = Callable[[nn.Module], None]


def diverge(rank: int, changes: dict, failed_rank: int | None, spoil: Spoil, folder: Path) -> Diverged:
    """Train until the non-finite values of the spoilt rank, or of all, reach all ranks."""
    build = loop.build_model_parts

    def build_spoilt(*arguments):
        model_parts = build(*arguments)
        if failed_rank in (rank, None):
            with torch.no_grad():
                spoil(model_parts[0])
        return model_parts

    loop.build_model_parts = build_spoilt
    try:
        loop.train(changed(CONFIG, **changes), EventRecorder(folder, rank))
    except Diverged as error:
        return error
    raise AssertionError("it trained on")


def reason_alone(spoil: Spoil, folder: Path, **changes: Any) -> str:
    """Return why one process diverges whose model is spoilt before the first step."""
    (error,) = on_ranks(1, diverge, changes, None, spoil, folder)
    return str(error)


def spoil_output_of(module: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    return lambda model: model.get_submodule(module).register_forward_hook(lambda _module, _args, out: change(out))


def test_non_finite_weight_is_reported(tmp_path) -> None:
    def spoil(model):
        model.layers[1].mlp.up.weight[3, 4] = float("nan")

    assert reason_alone(spoil, tmp_path) == "loss became nan at step 1: nan in the weight layers.1.mlp.up.weight"


# Explicit layers are reported as a whole.
@pytest.mark.parametrize(("name", "module"), [("grok1", "layers.1.attention.o"), ("llama", "layers.1")])
def test_module_with_non_finite_output_is_reported(tmp_path, name: str, module: str) -> None:
    spoil = spoil_output_of(module, lambda out: out * torch.inf)
    reason = reason_alone(spoil, tmp_path, model=SMALL_MODELS[name], mbs=2, ga=2, recompute_layers=2)
    assert reason.startswith("loss became nan at step 1: ")
    assert reason.endswith(f" first in the output of {module}, micro-batch 1")


@pytest.mark.parametrize(
    ("name", "module", "last"),
    [("grok1", "layers.0.attention", "layers.0.attention.o"), ("llama", "layers.1", "layers.0")],
)
def test_non_finite_gradient_is_reported(tmp_path, name: str, module: str, last: str) -> None:
    spoil = spoil_output_of(module, NanGradient.apply)
    # The first gradient after it in the backward pass is that of what the module last computed.
    first = f"nan first in the gradient of the output of {last}, micro-batch 1"
    assert reason_alone(spoil, tmp_path, model=SMALL_MODELS[name]) == f"grad norm became nan at step 1: {first}"


def test_micro_batch_is_reported(tmp_path) -> None:
    def spoil(model):
        calls = []

        def hook(_module, _args, output):
            calls.append(None)
            return output * torch.nan if len(calls) % 3 == 2 else output

        model.norm.register_forward_hook(hook)

    reason = reason_alone(spoil, tmp_path, mbs=1, gbs=3, ga=3)
    assert reason == "loss became nan at step 1: nan first in the output of norm, micro-batch 2"


def spoil_weight(model_part: nn.Module) -> None:
    values = next(x for name, x in sharded_parameters(model_part).own_values() if name.endswith("mlp.down.weight"))
    values.view(-1)[0] = torch.nan


def spoil_output(model_part: nn.Module) -> None:
    layer = next(iter(model_part.layers))
    layer.register_forward_hook(lambda _module, _args, output: output * torch.nan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "spoil"),
    by_turns(({"dp": 2, "gbs": 8}, {"tp": 2}, {"pp": 2, "mbs": 2, "ga": 2}), (spoil_weight, spoil_output)),
    ids=lambda setting: getattr(setting, "__name__", str(setting)),  # workers must agree: no address of a function
)
def test_all_ranks_report_the_failed_rank(layout, spoil, tmp_path) -> None:
    errors = on_ranks(2, diverge, layout, 1, spoil, tmp_path)
    assert [error.failed_rank for error in errors] == [1, 1]
    assert {str(error) for error in errors} == {str(errors[0])}
    assert str(errors[0]).endswith(", on rank 1")


def spoil_expert(model_part: nn.Module) -> None:
    torch.use_deterministic_algorithms(True)  # fills new memory, and so the padding of expert rows, with NaN
    next(iter(model_part.layers)).mlp.down.register_forward_hook(lambda _module, _args, output: output * torch.inf)


@pytest.mark.slow
def test_padding_of_expert_rows_is_not_reported(tmp_path) -> None:
    layout = {"model": SMALL_MODELS["grok1"], "dtype": "bf16", "dp": 2, "ep": 2, "gbs": 8}
    errors = on_ranks(2, diverge, layout, 1, spoil_expert, tmp_path)
    assert re.search("(nan|inf) first in the output of layers.0.mlp.down, micro-batch 1, on rank 1$", str(errors[0]))


@pytest.mark.slow
@pytest.mark.parametrize("spoilt_call", [1, 3])
def test_pipeline_gradient_is_reported_with_layers_and_micro_batch(spoilt_call, tmp_path) -> None:
    calls = []

    def spoil_gradient(model_part: nn.Module) -> None:
        def hook(_module, args):
            calls.append(None)
            x_BTC, *positional = args
            return (NanGradient.apply(x_BTC), *positional) if (len(calls) - 1) % 4 + 1 == spoilt_call else args

        next(iter(model_part.layers)).register_forward_pre_hook(hook)

    layout = {"layers": 4, "pp": 2, "vp": 2, "mbs": 1, "ga": 4}
    errors = on_ranks(2, diverge, layout, 1, spoil_gradient, tmp_path)
    where = f"the gradient of the residual into layers.1, micro-batch {spoilt_call}"
    assert str(errors[0]) == f"grad norm became nan at step 1: nan first in {where}, on rank 1"
    assert [error.failed_rank for error in errors] == [1, 1]


def test_output_of_a_model_part_is_reported_as_loss_or_residual() -> None:
    model = build_model(CONFIG.model)
    shard(model)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    report = find_first_nonfinite([model], lambda: model(tokens, tokens).backward())
    assert report == ("every tensor was finite when the step was repeated", None)
    model.register_forward_hook(lambda _module, _args, output: output * torch.nan)
    report = find_first_nonfinite([model], lambda: model(tokens, tokens))
    assert report.text == "nan first in the loss, micro-batch 1"
    model.last = False
    report = find_first_nonfinite([model], lambda: (model(tokens), model(tokens)))
    assert report.text == "nan first in the residual out of layers.0 to layers.1, micro-batch 1"


@pytest.mark.slow
def test_no_failed_rank_if_all_ranks_are_non_finite(tmp_path) -> None:
    spoil = spoil_output_of("norm", lambda out: out * torch.nan)
    errors = on_ranks(2, diverge, {"dp": 2, "gbs": 8}, None, spoil, tmp_path)
    assert [error.failed_rank for error in errors] == [None, None]
    assert str(errors[0]).endswith("nan first in the output of norm, micro-batch 1, on every rank")


def fits(config, **changes) -> bool:
    return memory_estimate(changed(config, **changes)).fits


def test_advised_remedies_suffice_cheapest_first() -> None:
    config = changed(ON_H200, layers=16, mbs=8, gbs=8)
    assert not fits(config)
    remedies = advice(config, 139 * GIB, requested=0.0).removesuffix(", by estimate").split(", or ")
    settings = []
    for remedy in remedies:
        setting, value = re.match(r"(?:lower|raise) (\w+) from \d+ to (\d+)", remedy).groups()
        settings.append(setting)
        assert fits(config, **{setting: int(value)} | ({"ga": 8 // int(value)} if setting == "mbs" else {})), remedy
    assert settings[:2] == ["mbs", "recompute_layers"]


def test_mildest_sufficient_remedy_is_advised() -> None:
    config = changed(ON_H200, layers=8, mbs=8, gbs=8)
    missing = 10 * GIB
    report = advice(config, memory_estimate(config).total - missing, requested=0.0)
    assert report.startswith("lower mbs from 8 to 4 (frees about ")
    number = int(report.split("raise recompute_layers from 0 to ")[1].split()[0])
    total = memory_estimate(config).total
    assert total - memory_estimate(changed(config, recompute_layers=number)).total >= missing
    assert total - memory_estimate(changed(config, recompute_layers=number - 1)).total < missing
    assert "none alone" not in report


def test_missing_memory_is_reported_if_no_remedy_suffices() -> None:
    config = changed(ON_H200, layers=32, mbs=1, gbs=1)
    report = advice(config, 80 * GIB, requested=0.0)
    assert "none alone frees the " in report
    assert "mbs" not in report


def test_failed_allocation_is_lower_bound_of_missing_memory() -> None:
    config = changed(ON_H200, layers=2, mbs=2, gbs=2)
    assert fits(config)
    assert "none alone frees the missing 50.0 GiB" in advice(config, 139 * GIB, requested=50.0 * GIB)


def test_only_supported_remedies_are_advised() -> None:
    report = advice(changed(ON_H200, dp=2, mbs=1, gbs=2, layers=4), 10 * GIB, requested=0.0)
    assert "pp" not in report
    assert "tp" not in report
