"""Root of all stored files: $LLMB_INSTALL, or ~/.llmb. A separate module to keep the start-up of commands fast."""

from collections.abc import Mapping
from pathlib import Path

from llmb.errors import ConfigError


def install_root(environ: Mapping[str, str]) -> Path:
    """Return the folder, absolute; it need not exist yet."""
    try:
        return Path(environ.get("LLMB_INSTALL") or "~/.llmb").expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no home folder, or the current folder is gone
        raise ConfigError(f"no install folder ({error}); set LLMB_INSTALL=/absolute/folder") from error
