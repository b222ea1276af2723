"""Root of all stored files: $LLMB_INSTALL, or ~/.llmb. A separate module to keep the start-up of commands fast."""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llmb.errors import ConfigError


def install_root(environ: Mapping[str, str]) -> Path:
    """Return the folder, absolute; it need not exist yet."""
    try:
        root = Path(environ.get("LLMB_INSTALL") or "~/.llmb").expanduser().absolute()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(root)
    except (RuntimeError, OSError) as error:  # no home folder, or the current folder is gone
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            raise ConfigError("LLMB_INSTALL is too long for the name of a folder") from error
        raise ConfigError(f"no install folder ({error}); set LLMB_INSTALL=/absolute/folder") from error
    return root
