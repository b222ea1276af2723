"""tokenizer.json of Hugging Face, read by the package `tokenizers`, which is imported here only.

read_tokenizer(Path("Llama-3.1-8B/tokenizer.json")).encode("Once upon a time").ids
"""

from pathlib import Path
from typing import Any

from llmb.errors import ConfigError


def read_tokenizer(file: Path) -> Any:
    """Return the tokenizer of an existing file; raise a ConfigError if it holds none."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("a tokenizer needs the package tokenizers: pip install tokenizers") from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{file} is not a tokenizer file: {error}") from error
