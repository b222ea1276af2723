"""What ends a run early is named: the first tensor that is not finite, and what would have saved memory."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from small_config import CONFIG, changed
from torch import nn
from torch.distributed.tensor import DTensor

from llmb.config.spec import Machine, Model
from llmb.events import StepDone
from llmb.models.architectures import build_model
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.results.readers.megatron_bridge_log import read
from llmb.runtime.recorder import Record
from llmb.runtime.run_ending import Diverged
from llmb.train import loop
from llmb.train.nonfinite import first_bad_tensor
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh
from llmb.train.train_oom import advice

EIGHT_BILLION = Model(
    name="8b", architecture="llama", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
)
ON_H200 = changed(
    replace(CONFIG, model=EIGHT_BILLION, machine=Machine(gpu="h200", gpus=1, gpus_per_node=8)),
    dtype="bf16",
    seqlen=8192,
)


class NoWayBack(torch.autograd.Function):
    """Finite forward; the gradient is not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


@pytest.fixture
def poisoned(trained, monkeypatch):
    """A run whose model is spoilt before the first step."""

    def train(spoil, **changes):
        build = loop.ready_parts

        def spoilt(*arguments):
            (model,) = build(*arguments)
            with torch.no_grad():
                spoil(model)
            return [model]

        monkeypatch.setattr(loop, "ready_parts", spoilt)
        done = trained(**changes)
        assert (done.code, done.ended().status) == (2, "diverged")
        return done.ended().reason

    return train


def test_a_weight_that_is_not_finite_is_named(poisoned) -> None:
    def spoil(model):
        model.layers[1].mlp.up.weight[3, 4] = float("nan")

    assert poisoned(spoil) == "loss became nan at step 1: nan in the weight layers.1.mlp.up.weight"


def test_a_module_whose_output_is_not_finite_is_named(poisoned) -> None:
    def spoil(model):
        model.layers[1].mlp.down.register_forward_hook(lambda _module, _args, output: output * torch.inf)

    reason = poisoned(spoil, mbs=2, ga=2, recompute_layers=2)
    assert reason.startswith("loss became nan at step 1: ")
    assert reason.endswith(" first in the output of layers.1.mlp.down, micro-batch 1")


def test_a_gradient_that_is_not_finite_is_named(poisoned) -> None:
    def spoil(model):
        model.layers[0].mlp.register_forward_hook(lambda _module, _args, output: NoWayBack.apply(output))

    # From there the backward pass comes to what the last matrix of that MLP put out.
    first = "nan first in the gradient of the output of layers.0.mlp.down, micro-batch 1"
    assert poisoned(spoil) == f"grad norm became nan at step 1: {first}"


def test_a_micro_batch_is_named(poisoned) -> None:
    def spoil(model):
        calls = []

        def hook(_module, _args, output):
            calls.append(None)
            return output * torch.nan if len(calls) % 3 == 2 else output

        model.norm.register_forward_hook(hook)

    reason = poisoned(spoil, mbs=1, gbs=3, ga=3)
    assert reason == "loss became nan at step 1: nan first in the output of norm, micro-batch 2"


def diverge(rank: int, layout: dict, guilty: int, spoil: Callable[[nn.Module], None], folder: Path) -> Diverged:
    """Train until the spoilt rank's trouble is everyone's."""
    build = loop.ready_parts

    def spoilt(*arguments):
        parts = build(*arguments)
        if rank == guilty:
            with torch.no_grad():
                spoil(parts[0])
        return parts

    loop.ready_parts = spoilt
    try:
        loop.train(changed(CONFIG, **layout), Record(folder, rank))
    except Diverged as error:
        return error
    raise AssertionError("it trained on")


def lose_weight(part: nn.Module) -> None:
    weight = next(p for name, p in part.named_parameters() if name.endswith("mlp.down.weight"))
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    local.view(-1)[0] = torch.nan


def lose_output(part: nn.Module) -> None:
    layer = next(iter(part.layers))
    layer.mlp.up.register_forward_hook(lambda _module, _args, output: output * torch.nan)


@pytest.mark.parametrize("layout", [{"dp": 2, "gbs": 8}, {"tp": 2}, {"pp": 2, "mbs": 2, "ga": 2}], ids=str)
@pytest.mark.parametrize("spoil", [lose_weight, lose_output])
def test_the_rank_it_came_from_is_named_by_all(layout, spoil, tmp_path) -> None:
    errors = on_ranks(2, diverge, layout, 1, spoil, tmp_path)
    assert [error.guilty_rank for error in errors] == [1, 1]
    assert {str(error) for error in errors} == {str(errors[0])}
    assert str(errors[0]).endswith(", on rank 1")


@pytest.mark.parametrize("spoilt_call", [1, 3])
def test_in_a_pipeline_a_gradient_is_named_with_its_layers_and_its_own_micro_batch(spoilt_call, tmp_path) -> None:
    calls = []

    def lose_gradient(part: nn.Module) -> None:
        def hook(_module, args):
            calls.append(None)
            x_BTC, *rest = args
            return (NoWayBack.apply(x_BTC), *rest) if (len(calls) - 1) % 4 + 1 == spoilt_call else args

        next(iter(part.layers)).register_forward_pre_hook(hook)

    layout = {"layers": 4, "pp": 2, "vp": 2, "mbs": 1, "ga": 4}
    errors = on_ranks(2, diverge, layout, 1, lose_gradient, tmp_path)
    where = f"the gradient of the stream into layers.1, micro-batch {spoilt_call}"
    assert str(errors[0]) == f"grad norm became nan at step 1: nan first in {where}, on rank 1"
    assert [error.guilty_rank for error in errors] == [1, 1]


def test_what_a_stage_passes_on_is_not_called_the_loss() -> None:
    model = build_model(CONFIG.model)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    model.register_forward_hook(lambda _module, _args, output: output * torch.nan)
    said = first_bad_tensor([model], lambda: model(tokens, tokens))
    assert said.text == "nan first in the loss, micro-batch 1"
    model.last = False
    said = first_bad_tensor([model], lambda: (model(tokens), model(tokens)))
    assert said.text == "nan first in the stream out of layers.0 to layers.1, micro-batch 1"


def test_what_all_ranks_find_is_no_ranks_fault(tmp_path) -> None:
    def spoil(part: nn.Module) -> None:
        part.norm.register_forward_hook(lambda _module, _args, output: output * torch.nan)

    errors = on_ranks(2, diverge_everywhere, spoil, tmp_path)
    assert [error.guilty_rank for error in errors] == [None, None]
    assert str(errors[0]).endswith("nan first in the output of norm, micro-batch 1, on every rank")


def diverge_everywhere(rank: int, spoil: Callable[[nn.Module], None], folder: Path) -> Diverged:
    return diverge(rank, {"dp": 2, "gbs": 8}, rank, spoil, folder)


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    optimizer = Optimizer(model.named_parameters(), Mesh(0, 1, torch.device("cpu")), 1e-2, set())
    for factor in (1.0, float("inf"), 1.0):
        before = [p.clone() for p in model.parameters()]
        (model(torch.ones(1, 3)).sum() * factor).backward()
        norm = optimizer.update(1e-2)
        same = [torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]
        assert same == [not norm.isfinite()] * 2
    assert {int(state["step"]) for state in optimizer.state().values()} == {2}


def test_nothing_bad_is_said_too() -> None:
    model = build_model(CONFIG.model)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    said = first_bad_tensor([model], lambda: model(tokens, tokens).backward())
    assert said == ("every tensor was finite when the step was repeated", None)


def test_the_log_is_read_like_megatron_bridges(trained, capsys) -> None:
    done = trained()
    lines = capsys.readouterr().out.splitlines()
    read_back = [event for event in read(lines) if isinstance(event, StepDone)]
    assert [event.step for event in read_back] == [1, 2, 3, 4]
    for event, step in zip(read_back, done.steps(), strict=True):
        assert event.loss == pytest.approx(step.loss, rel=1e-6)
        assert event.memory_bytes == pytest.approx(step.memory_bytes, rel=1e-2)
        assert event.reported_tflops_per_gpu is None or event.reported_tflops_per_gpu < 1


def fits(config, **changes) -> bool:
    return memory_estimate(changed(config, **changes)).fits


def test_all_that_is_named_suffices_and_the_cheapest_comes_first() -> None:
    config = changed(ON_H200, layers=16, mbs=8, gbs=8)
    assert not fits(config)
    remedies = advice(config, 139 * GIB, asked=0.0).removesuffix(", by estimate").split(", or ")
    knobs = []
    for remedy in remedies:
        knob, value = re.match(r"(?:lower|raise) (\w+) from \d+ to (\d+)", remedy).groups()
        knobs.append(knob)
        assert fits(config, **{knob: int(value)} | ({"ga": 8 // int(value)} if knob == "mbs" else {})), remedy
    assert knobs[:2] == ["mbs", "recompute_layers"]


def test_the_mildest_of_a_kind_is_named() -> None:
    config = changed(ON_H200, layers=8, mbs=8, gbs=8)
    lacking = 10 * GIB
    said = advice(config, memory_estimate(config).total - lacking, asked=0.0)
    assert said.startswith("lower mbs from 8 to 4 (frees about ")
    number = int(said.split("raise recompute_layers from 0 to ")[1].split()[0])
    now = memory_estimate(config).total
    assert now - memory_estimate(changed(config, recompute_layers=number)).total >= lacking
    assert now - memory_estimate(changed(config, recompute_layers=number - 1)).total < lacking
    assert "none alone" not in said


def test_when_no_change_suffices_the_lack_is_said() -> None:
    config = changed(ON_H200, layers=32, mbs=1, gbs=1)
    said = advice(config, 80 * GIB, asked=0.0)
    assert "none alone frees the " in said
    assert "mbs" not in said


def test_the_allocation_that_failed_is_the_least_that_is_lacking() -> None:
    config = changed(ON_H200, layers=2, mbs=2, gbs=2)
    assert fits(config)
    assert "none alone frees the 50.0 GiB" in advice(config, 139 * GIB, asked=50.0 * GIB)


def test_only_what_this_engine_runs_is_advised() -> None:
    said = advice(changed(ON_H200, dp=2, mbs=1, gbs=2, layers=4), 10 * GIB, asked=0.0)
    assert "pp" not in said
    assert "tp" not in said
