"""Configurations that the out-of-core engine supports: it refuses settings that it would ignore."""

import os
import shutil
from pathlib import Path
from typing import Any

from llmb.config.lr_schedule import check_lr_steps
from llmb.config.model import Model
from llmb.config.native.fp8_recipe_limits import check_many_scales
from llmb.config.native.llama_layer_shapes import check_fp8_widths, check_llama_layers, has_llama_layers
from llmb.config.native.lora_shapes import lora_of
from llmb.config.native.number_formats import FP8_RECIPES, check_fp8_recipe, fp8_recipe
from llmb.config.offload_plan import FULL, Plan
from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import ConfigError

# The only values that are computed, of the fields of a model and of its experts: a load-balancing loss is that of a
# micro-batch, which chunks are not.
MODEL_FIELDS: dict[str, Any] = {"gated": True, "pattern": None, "mla": None, "mamba": None}
EXPERT_FIELDS: dict[str, Any] = {
    "aux_loss": 0.0, "shared": 0, "dense_layers": 0, "score": "softmax", "correction_bias": False, "latent": None,
}  # fmt: skip


def supported_outofcore(config: RunConfig) -> tuple[OutOfCore, Plan]:
    """Return the workload and the plan of a configuration that this engine fully supports, or raise a ConfigError."""
    workload = config.workload
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.offload is the native engine")
    if not isinstance(workload, OutOfCore):
        raise ConfigError(f"a workload of kind {workload.kind}: python -m llmb.offload runs kind outofcore")
    check_outofcore_model(config.model, config.precision.dtype)
    if workload.plan is None:
        raise ConfigError("workload.plan is null: `llmb-run submit` makes it, and `llmb-run plan` shows it")
    _check(config, workload, workload.plan)
    _check_export(workload)
    if workload.weights is not None and not Path(workload.weights).is_dir():
        raise ConfigError(f"weights={workload.weights} is no folder; name one in Hugging Face's layout")
    return workload, workload.plan


def check_outofcore_model(model: Model, dtype: str) -> None:
    """Refuse in one line a model that out-of-core training does not compute, or not in this dtype."""
    fields = {name: (getattr(model, name), value) for name, value in MODEL_FIELDS.items()}
    if model.experts is not None:
        fields |= {f"experts.{name}": (getattr(model.experts, name), value) for name, value in EXPERT_FIELDS.items()}
    for name, (value, computed) in fields.items():
        if value != computed:
            raise ConfigError(f"out-of-core training does not compute {name}={value!r} of {model.name}")
    if model.rope is None:
        raise ConfigError(f"out-of-core training does not compute rope=None of {model.name}")
    if dtype == "fp8":
        try:
            check_llama_layers(model)
        except ConfigError as error:
            raise ConfigError(f"out-of-core training in fp8: {error}; use dtype=bf16") from None
        check_fp8_widths(model)


def _check(config: RunConfig, workload: OutOfCore, plan: Plan) -> None:
    ranks, chunks, precision = config.parallel.world_size, plan.chunks_per_round, config.precision
    recipe = fp8_recipe(config)
    planned = plan.fp8_recipe if plan.fp8_recipe is not None or recipe is None else FP8_RECIPES[workload.kind][0]
    problems = {
        f"{ranks} ranks: it computes on one GPU": ranks != 1,
        f"workload.steps={workload.steps}: must be at least 1": workload.steps < 1,
        f"checkpoint_every={workload.checkpoint_every}: must be at least 1": (workload.checkpoint_every or 1) < 1,
        f"seqlen={workload.seqlen}, but its plan is for {plan.seqlen}": plan.seqlen != workload.seqlen,
        f"gbs={workload.gbs}, but its plan is for {plan.gbs}": workload.gbs not in (None, plan.gbs),
        f"dtype={precision.dtype}, but its plan is for {plan.dtype}": plan.dtype != precision.dtype,
        f"fp8_recipe={recipe}, but its plan is for {planned}": planned != recipe,
        f"kv_dtype={precision.kv_dtype}: keys have the dtype of the run": precision.kv_dtype is not None,
        f"update={workload.update}, but its plan is for {plan.update}": plan.update != workload.update,
        f"clip={workload.clip} needs a plan that updates in the next forward pass": workload.clip is not None
        and plan.update_at != "forward"
        and plan.lora is None,
        f"lora_rank={workload.lora_rank} and its settings, for which its plan was not made": plan.lora
        != lora_of(workload, config.model, precision.dtype),
        f"workload.plan.levels has {len(plan.levels)} letters, not {config.model.layers} layers * {chunks} chunks": len(
            plan.levels
        )
        != config.model.layers * chunks,
        f"level {FULL} in workload.plan.levels of {config.model.name}, whose layers recompute": FULL in plan.levels
        and not has_llama_layers(config.model),
    }
    messages = [message for message, applies in problems.items() if applies]
    if messages:
        raise ConfigError(f"the out-of-core engine does not run {'; nor '.join(messages)}")
    check_fp8_recipe(precision.fp8_recipe, workload.kind, precision.dtype)
    check_many_scales(config)
    check_lr_steps(workload.lr_warmup_steps, workload.lr_decay_steps)


def disk_misfit(disk_path: str | None, size: int) -> str | None:
    """Return why so many bytes of a plan cannot live in a folder on disk; None: they can."""
    needs = f"the plan keeps {size / 2**30:.2f} GiB on disk"
    if disk_path is None:
        return f"{needs}; name a folder there: --set disk_path=FOLDER"
    folder = Path(disk_path)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return f"{needs}, and disk_path={disk_path} is no folder that can be written; name one that is"
    free = shutil.disk_usage(folder).free
    if free < size:
        return f"{needs}, and {disk_path} has {free / 2**30:.2f} GiB free; name another disk_path, or raise --host-gb"
    return None


def _check_export(workload: OutOfCore) -> None:
    """Refuse an export to an existing folder before the run, which may take days."""
    folder = None if workload.export is None else Path(workload.export)
    if folder is not None and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()))):
        raise ConfigError(f"export={folder} exists already; weights are written to a new folder")
