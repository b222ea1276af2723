"""Options of the HTTP server, shared by `llmb-run serve` and `python -m llmb.serve.http`.

The API key itself is never here: only where the server reads it from.
"""

import argparse
from dataclasses import dataclass, fields

from llmb.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, limits and names of a server."""

    host: str = LOOPBACK
    port: int = 8000
    served_model_name: str | None = None  # none: the model's own
    max_model_len: int | None = (
        None  # tokens of prompt and output; none: the model's context, as far as the cache holds
    )
    replicas: int = 1
    max_queue: int = 1024
    max_body_mb: float = 8.0
    request_timeout: float = 600.0
    stall_timeout: float = 30.0
    drain_timeout: float = 30.0
    api_key_env: str | None = None
    api_key_file: str | None = None


HELP: dict[str, tuple[str, str]] = {  # metavar and help of each option
    "host": ("H", f"address to listen on; default {LOOPBACK}, this machine only"),
    "port": ("N", "port; 0 takes a free one and prints it; default 8000"),
    "served_model_name": ("NAME", "name of the model in the API; default: the model's own"),
    "max_model_len": ("TOKENS", "prompt and output together; default: the model's context, as far as the cache holds"),
    "replicas": ("N", "engines behind the port, each on GPUs of its own; default 1"),
    "max_queue": ("N", "waiting requests, beyond which new ones get 429; default 1024"),
    "max_body_mb": ("MB", "size of a request body, beyond which it gets 413; default 8"),
    "request_timeout": ("S", "seconds after which a request is ended; default 600"),
    "stall_timeout": ("S", "seconds after which a client that reads nothing is disconnected; default 30"),
    "drain_timeout": ("S", "seconds that unfinished requests get at shutdown; default 30"),
    "api_key_env": ("NAME", "environment variable that holds the API key"),
    "api_key_file": ("FILE", "file that holds the API key, in one line"),
}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of ServerOptions."""
    for field in fields(ServerOptions):
        metavar, text = HELP[field.name]
        kind = float if field.type is float else int if field.type in (int, int | None) else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def server_options(options: argparse.Namespace) -> ServerOptions:
    """Return the options of a command line, checked."""
    chosen = {field.name: getattr(options, field.name) for field in fields(ServerOptions)}
    result = ServerOptions(**{name: value for name, value in chosen.items() if value is not None})
    if not 0 <= result.port < 65536:
        raise ConfigError(f"--port {result.port}: ports are 0 (any free one) to 65535")
    for name, least in (("max_model_len", 2), ("replicas", 1), ("max_queue", 1)):
        value = getattr(result, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    for name in ("max_body_mb", "request_timeout", "stall_timeout"):
        if not getattr(result, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(result, name):g}: must be above 0")
    if not result.drain_timeout >= 0:
        raise ConfigError(f"--drain-timeout {result.drain_timeout:g}: must be at least 0")
    if result.api_key_env is not None and result.api_key_file is not None:
        raise ConfigError("--api-key-env and --api-key-file exclude each other")
    return result


def server_arguments(options: ServerOptions) -> list[str]:
    """Return the command line of these options, without those that have their default."""
    arguments = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            arguments += [f"--{field.name.replace('_', '-')}", str(value)]
    return arguments
