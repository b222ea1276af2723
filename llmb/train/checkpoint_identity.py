"""What a checkpoint and the run that resumes from it must have in common.

Apart from `train_checkpoint.py`, whose import of torch.distributed.checkpoint takes a second that most runs save.
"""

from pathlib import Path
from typing import Any

from llmb.config.native.number_formats import fp8_recipe
from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig, Training
from llmb.runtime import checkpoint_folder

FORMAT = 2  # incremented when a tensor of the same name and shape changes its meaning; 1 was not recorded


def resume_checkpoint(config: RunConfig, workload: Training, folder: Path) -> Path | None:
    """Return the checkpoint that a run resumes from, checked against its configuration; None: a new run."""
    return checkpoint_folder.resume_checkpoint(workload, folder, identity(config, workload), FORMAT)


def identity(config: RunConfig, workload: Training) -> dict[str, Any]:
    """Return what must match for a bit-exact resume: model shape, dtype and data order."""
    shape = {f"model.{name}": value for name, value in to_plain(config.model).items() if name != "name"}
    data = {name: getattr(workload, name) for name in ("seqlen", "gbs", "seed")}
    return shape | {"dtype": config.precision.dtype} | data


def precision(config: RunConfig, workload: Training) -> dict[str, Any]:
    """Return the number formats that a resumed run may change, with a warning."""
    formats = {name: getattr(workload, name) for name in ("master_weights", "gradients", "moments")}
    return {"fp8_recipe": fp8_recipe(config)} | formats
