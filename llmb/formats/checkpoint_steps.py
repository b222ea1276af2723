"""Names of checkpoints in a run folder: checkpoints/step_10/ is complete, checkpoints/step_15.partial/ is not."""

import re
from pathlib import Path

FOLDER = "checkpoints"  # of the run folder

_COMPLETE = re.compile(r"step_([0-9]{1,18})")


def is_complete(path: Path) -> bool:
    """Return whether this is the name of a complete checkpoint."""
    return bool(_COMPLETE.fullmatch(path.name))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(filter(is_complete, paths), key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Return the step after which a complete checkpoint was written."""
    return int(path.name.removeprefix("step_"))
