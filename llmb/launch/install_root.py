"""Where everything is kept: $LLMB_INSTALL, or ~/.llmb. A file of its own, as every command asks and few need more."""

from collections.abc import Mapping
from pathlib import Path

from llmb.errors import ConfigError


def install_root(environ: Mapping[str, str]) -> Path:
    """The folder, absolute; it need not exist yet."""
    try:
        return Path(environ.get("LLMB_INSTALL") or "~/.llmb").expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no home folder, or the current folder is gone
        raise ConfigError(f"no folder to work in ({error}); name one: LLMB_INSTALL=/absolute/folder") from error
