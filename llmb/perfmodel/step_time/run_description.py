"""A described run as a configuration, by which memory is estimated.

run_config(setup).model.layers          -> those of the run, with multi-token prediction's
"""

from dataclasses import replace
from typing import Any

from llmb.config.model import Model
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.perfmodel.hardware import gpu
from llmb.perfmodel.step_time.step_setup import RECIPE_DTYPES, StepSetup

NATIVE = "native"  # the engine of this repository


def run_model(setup: StepSetup) -> Model:
    """Return the model with the layers of the run, MTP's included; dense layers of a mixture shrink with them."""
    model, added = setup.shape.model, setup.shape.mtp_layers
    layers = setup.layer_count + added
    if layers == model.layers:
        return model
    experts = model.experts and replace(model.experts, dense_layers=min(model.experts.dense_layers, layers - 1))
    pattern = model.pattern and (model.pattern + "*E" * added)[:layers]
    return replace(model, layers=layers, experts=experts, pattern=pattern)


def _precision(setup: StepSetup) -> Precision:
    recipes: dict[str, Any] = {dtype: recipe for recipe, dtype in RECIPE_DTYPES.items()}
    if setup.engine != NATIVE or setup.dtype not in ("fp8", *recipes):
        return Precision(dtype="bf16")
    return Precision(dtype="fp8", fp8_recipe=recipes.get(setup.dtype))


def run_config(setup: StepSetup) -> RunConfig:
    """Return the run as a configuration of its kind of engine, for the memory estimate."""
    split, rematerializes = setup.parallel, setup.engine == "jax"  # XLA does by default
    return RunConfig(
        name=setup.shape.model.name,
        target="predict",
        size="",
        engine="native" if setup.engine == NATIVE else "megatron_bridge",
        machine=Machine(gpu=setup.gpu, gpus=setup.gpus, gpus_per_node=gpu(setup.gpu).gpus_per_node),
        model=run_model(setup),
        parallel=Parallel(
            dp=setup.dp, fsdp=split.fsdp, tp=split.tp, pp=split.pp, cp=split.cp, ep=split.ep, etp=split.etp, vp=split.vp
        ),
        precision=_precision(setup),
        workload=Training(
            seqlen=setup.seqlen,
            mbs=setup.mbs,
            gbs=setup.gbs,
            ga=setup.ga,
            recompute_layers=(replace(setup, recompute="full") if rematerializes else setup).recomputed_layers,
            offload_layers=setup.offload_layers,
            **(setup.formats.fields() if setup.engine == NATIVE else {}),
        ),
    )
