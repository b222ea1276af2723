"""Facts that a checkpoint and the run that resumes from it must have in common.

Apart from `train_checkpoint.py`, whose import of torch.distributed.checkpoint takes a second that most runs save.
"""

from pathlib import Path
from typing import Any

from llmb.config.native.number_formats import fp8_recipe
from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig, Training
from llmb.runtime import checkpoint_folder
from llmb.runtime.token_data import TokenFile, data_course

FORMAT = 2  # incremented when a tensor of the same name and shape changes its meaning; 1 was not recorded


def resume_point(
    config: RunConfig, workload: Training, data: TokenFile | None, folder: Path
) -> checkpoint_folder.ResumePoint | None:
    """Return where a run resumes, checked against its configuration; None: a new run."""
    expected = {} if workload.resume is None else course(config, workload, data)
    return checkpoint_folder.resume_point(workload, folder, identity(config), expected, FORMAT)


def identity(config: RunConfig) -> dict[str, Any]:
    """Return what decides which tensors there are: model shape and dtype."""
    shape = {f"model.{name}": value for name, value in to_plain(config.model).items() if name != "name"}
    return shape | {"dtype": config.precision.dtype}


def course(config: RunConfig, workload: Training, data: TokenFile | None) -> dict[str, Any]:
    """Return what decides how training goes on: data and their order, learning rate, number formats.

    The position in the data follows from step, gbs and seqlen.
    """
    formats = {name: getattr(workload, name) for name in ("master_weights", "gradients", "moments")}
    return data_course(workload, workload.gbs, data) | {"fp8_recipe": fp8_recipe(config)} | formats
