"""Kernels that a micro-batch launches, as the predictor counts them, against those of a dry run."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest
from small_models import SMALL_MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from training_ranks import layout_config

from llmb.config.model import MambaConfig, Model, MoEConfig
from llmb.config.native.training_support import supported_training
from llmb.config.spec import RunConfig
from llmb.perfmodel.step_time.native_kernels import native_kernels
from llmb.perfmodel.step_time.step_setup import setup_of
from llmb.train.dry_run import dry_run
from llmb.train.dry_run.meta_rank import MetaRank

# Operations that launch nothing: they allocate, or return another view.
ALLOCATIONS = ("empty", "new_empty", "detach", "lift_fresh", "_unsafe_view", "record_stream")
LLAMA = replace(SMALL_MODELS["llama"], hidden=64, layers=2)
EXPERTS = MoEConfig(count=4, top_k=2, ffn=48, renormalise=False)
GROK = replace(SMALL_MODELS["grok1"], hidden=64, layers=2, experts=EXPERTS)
# Projections of widths that fp8 GEMMs take.
MAMBA = MambaConfig(heads=32, head_dim=16, groups=2, state=16, chunk=16)
NEMOTRON = replace(SMALL_MODELS["nemotron_h"], hidden=64, mamba=MAMBA)


class LaunchCounter(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = function._schema
        name = schema.name.partition("::")[2]
        is_view = not schema.is_mutable and any(a.alias_info is not None for a in schema.arguments)
        self.count += not is_view and not name.startswith(ALLOCATIONS)
        return function(*args, **(kwargs or {}))

    def add(self, *_launch: object) -> None:
        self.count += 1


def launches(config: RunConfig) -> int:
    """Return the launches of a micro-batch in the middle of a step, forward and backward."""
    counter, passes = LaunchCounter(), list[int]()
    with patch.object(dry_run, "_count_scan", counter.add), dry_run.dry_run_rank(config, 0) as (mesh, watch):
        rank = MetaRank(config, supported_training(config), mesh, watch)
        cost = rank._cost

        def counted(run: Callable[[], None]) -> Any:
            before = counter.count
            with counter:
                result = cost(run)
            passes.append(counter.count - before)
            return result

        rank._cost = counted  # type: ignore[method-assign]
        (part,) = rank.model_parts
        rank._costs(part)
    return sum(passes[2:4])  # forward and backward of the first, middle and last micro-batch


def in_dry_run(config: RunConfig) -> int:
    """Return the launches, counted in a process of its own: a dry run substitutes Triton for good."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(launches, config).result()


def config_of(model: Model, dtype: str, layout: dict[str, int | bool]) -> RunConfig:
    """Return a run of one micro-batch of each kind; one rank of its layout runs alone."""
    fields: dict[str, Any] = {"seqlen": 64, "mbs": 1, "gbs": 3 * int(layout.get("dp", 1)), "gpu": "h200"}
    if model.experts is not None:
        fields |= {"balanced_experts": True, "fp8_experts": True if dtype == "fp8" else None}
    recipe = "tensorwise_delayed" if dtype == "fp8" else None
    config = layout_config(model, dtype=dtype, fp8_recipe=recipe, **fields, **layout)
    assert config.workload.ga == 3
    return config


def check(small: Model, large: Model, dtype: str, **layout: int | bool) -> None:
    """Compare the launches of the layers that one model has more than the other."""
    configs = [config_of(model, dtype, layout) for model in (large, small)]
    counted, predicted = ([count(config) for config in configs] for count in (in_dry_run, _predicted))
    assert counted[0] - counted[1] == predicted[0] - predicted[1]


def _predicted(config: RunConfig) -> float:
    return native_kernels(setup_of(config))


@pytest.mark.slow
def test_launches_of_a_grok_layer_in_fp8_are_those_of_a_dry_run():
    check(replace(GROK, layers=1), GROK, "fp8", tp=2, cp=2, ep=4)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", [{}, {"dp": 4, "ep": 4}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2, "ep": 4}], ids=str)
def test_launches_of_a_grok_layer_are_those_of_a_dry_run(dtype, layout):
    check(replace(GROK, layers=1), GROK, dtype, **layout)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "cp": 2}, {"dp": 2, "fsdp": True}], ids=str)
def test_launches_of_a_llama_layer_are_those_of_a_dry_run(dtype, layout):
    check(replace(LLAMA, layers=1), LLAMA, dtype, **layout)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_launches_of_a_dense_deepseek_layer_are_those_of_a_dry_run(dtype, tp):
    deepseek = SMALL_MODELS["deepseek"]
    experts = [replace(deepseek.experts, dense_layers=layers) for layers in (2, 3)]
    small, large = (replace(deepseek, hidden=64, layers=e.dense_layers, experts=e) for e in experts)
    check(small, large, dtype, tp=tp)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("letter", "M-*")
def test_launches_of_a_nemotron_layer_are_those_of_a_dry_run(dtype, tp, letter):
    small, large = (replace(NEMOTRON, pattern=pattern, layers=len(pattern)) for pattern in ("MM", f"MM{letter}"))
    check(small, large, dtype, tp=tp)
