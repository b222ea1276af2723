"""Two sides of `llmb-run ab`: a configuration each, with the environment and the interpreter of its ranks."""

import argparse
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmb.cli import submit
from llmb.cli.jobs.jobs import open_run
from llmb.cli.run_options import load_recipes
from llmb.cli.subcommand import Parser
from llmb.config.resolve import resolve_all
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.launch.install_root import install_root
from llmb.launch.secrets import mask


@dataclass(frozen=True, kw_only=True)
class Side:
    """Configuration and process environment of A or of B."""

    config: RunConfig
    environment: dict[str, str]  # of the ranks, secrets included
    python: str

    @property
    def process(self) -> str:
        """Environment, interpreter and checkout of its own, in brackets; empty: none."""
        interpreter = [] if self.python == sys.executable else [self.python]
        details = interpreter + [f"{name}={value}" for name, value in mask(self.environment).items()]
        return f" ({', '.join(details)})" if details else ""


def side_of(spec: str, variables: list[str], python: str | None, checkout: Path | None) -> Side:
    """Return a side from options of submit (`-w ... --proxy`), a job id, a run folder or its config.json."""
    config, environment = _from_options(spec) if spec.lstrip().startswith("-") else (_from_run(spec), {})
    environment = environment | submit.parse_environment(variables)
    if checkout is not None:
        if not (checkout / "llmb" / "__init__.py").exists():
            raise ConfigError(f"{checkout} is no checkout of llmb: it has no llmb/__init__.py")
        environment["PYTHONPATH"] = str(checkout.absolute())
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(f"{python} is no Python interpreter: it cannot be executed")
    recorded = mask(dict(config.environment) | environment)
    return Side(config=replace(config, environment=recorded), environment=environment, python=python or sys.executable)


def _from_run(spec: str) -> RunConfig:
    from llmb.config.load_settings import config_from_json
    from llmb.config.serialization import read_json

    path = Path(spec)
    if path.is_file():
        return config_from_json(read_json(path), str(path))
    config: RunConfig = open_run(spec).read_config()
    return config


def _from_options(spec: str) -> tuple[RunConfig, dict[str, str]]:
    options = parse_submit(spec)
    recipes = load_recipes()
    resolved, errors = resolve_all(submit.tasks_of(options, recipes), recipes, install_root(os.environ))
    if errors:
        raise ConfigError(errors[0])
    if len(resolved) != 1:
        raise ConfigError(f"{spec!r} selects {len(resolved)} runs; name one size, dtype and scale")
    task: Any
    task, config = resolved[0]
    return config, dict(task.request.environment)


def parse_submit(spec: str) -> argparse.Namespace:
    """Parse a string of submit's options, as a shell would split it."""
    commands = Parser(prog="llmb-run").add_subparsers(parser_class=Parser)
    submit.add_commands(commands)
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise ConfigError(f"{spec!r}: {error}") from error
    options: argparse.Namespace = commands.choices["submit"].parse_args(words)
    return options
