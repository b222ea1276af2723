"""API key of the server: read from a file or an environment variable, compared in constant time, never printed."""

import hmac
import os
from pathlib import Path

from llmb.config.server_options import ServerOptions
from llmb.errors import ConfigError
from llmb.serve.http.openai_error import ApiError


def read_api_key(options: ServerOptions) -> str | None:
    """Return the key that clients must send; None: any client may connect."""
    if options.api_key_env is not None:
        key, source = os.environ.pop(options.api_key_env, ""), f"the environment variable {options.api_key_env}"
    elif options.api_key_file is not None:
        source = options.api_key_file
        try:
            key = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API key from {source}: {type(error).__name__}") from error
    else:
        return None
    key = key.strip()
    if not key or not key.isprintable():
        raise ConfigError(f"{source} holds no API key: it must be one line that is not empty")
    return key


def check_authorization(key: str | None, header: str) -> None:
    """Raise a 401 unless the header is `Bearer KEY`."""
    if key is None:
        return
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), key.encode()):
        raise ApiError(
            "the API key is missing or wrong: send it as Authorization: Bearer KEY",
            401,
            "authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
