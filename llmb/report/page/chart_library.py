"""Script of the charting library, compressed, so that a page carries it and needs no network.

Plotly's figures are plain JSON, so the library is never imported: its script is read from the installed package.
"""

import gzip
import sys
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path

from llmb.errors import ConfigError

INSTALL = f"{sys.executable} -m pip install plotly"


def compressed_script() -> str:
    """Return the script as base64 of gzip, a third of its size; the fastest level, as every run writes a page."""
    package = find_spec("plotly")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"charts need Plotly, which is not installed: {INSTALL}")
    path = Path(package.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    try:
        script = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read Plotly's script {path}: {error.strerror}; {INSTALL}") from error
    return b64encode(gzip.compress(script, compresslevel=1, mtime=0)).decode()
