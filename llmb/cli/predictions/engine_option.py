"""The engine of a prediction: --engine or --set engine=, and a line about the other where a command names none."""

import argparse
from collections.abc import Callable

from llmb.errors import ConfigError

ENGINE_HELP = (
    "--model: megatron-bridge (default), native, torchtitan, ...; to serve vllm (default), sglang, trtllm, native. "
    "-w: the engine that published the row; to serve native"
)


def settings_with_engine(options: argparse.Namespace) -> list[str]:
    """Return the --set settings of a training run, with the engine that --engine names."""
    settings: list[str] = options.set
    if options.engine is None:
        return settings
    if _names_engine(settings):
        raise ConfigError("--engine and --set engine= both name the engine; leave one of them out")
    return [*settings, f"engine={options.engine}"]


def other_engine_note(
    options: argparse.Namespace, engine: str, native_time: Callable[[], str] | None = None
) -> str | None:
    """Return which engine is predicted where a command names none, and the time of this repository's.

    `show` and `submit` run that one, so the same model or row would get two figures without a word. None: the command
    names an engine, or predicts this one.
    """
    from llmb.perfmodel.step_time.run_description import NATIVE

    is_named = options.engine is not None or _names_engine(options.set)
    if is_named or engine == NATIVE:
        return None
    why, model = ("as none is named", " --model") if options.workload is None else ("which published the row", "")
    try:
        settings = " with the same settings" if model else ""  # of a row it may leave some out, which `show` lists
        time = f": {native_time()}{settings}" if native_time else ""
    except ConfigError as error:
        time = f", which does not run this: {error}"
    return f"engine {engine}, {why}; `show` and `submit{model}` run engine {NATIVE} (--engine {NATIVE}){time}"


def _names_engine(settings: list[str]) -> bool:
    return any(text.startswith("engine=") for text in settings)


def print_note(note: str | None) -> None:
    """Print a note, if there is one."""
    from llmb.report.terminal.colour import print_report

    if note is not None:
        print_report(note)
