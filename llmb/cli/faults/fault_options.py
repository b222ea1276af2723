"""Options of `submit` that inject faults into runs: --faults FILE and --fault-rate N/day."""

import argparse
import os
from pathlib import Path
from typing import Any


def add_fault_options(parser: argparse.ArgumentParser) -> None:
    """Add --faults and --fault-rate."""
    file_help = "inject the faults of this list and measure goodput: - {kind: hang, step: 12, rank: 0}"
    parser.add_argument("--faults", type=Path, metavar="FILE", help=file_help)
    rate_help = "the same with faults drawn by the run's seed: 24/day of predicted step time, or 50/1000steps"
    parser.add_argument("--fault-rate", metavar="N/day", help=rate_help)


def inject_faults(resolved: list[tuple[Any, Any]], options: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Return the runs with the faults of the options; as they are without such an option."""
    if options.faults is None and options.fault_rate is None:
        return resolved
    from llmb.config.faults.fault_file import draw_faults, read_faults, with_faults
    from llmb.errors import ConfigError

    if options.faults is not None and options.fault_rate is not None:
        raise ConfigError("--faults and --fault-rate exclude each other; give one of them")
    if options.faults is not None:
        plan = read_faults(options.faults)
        return [(task, with_faults(config, plan)) for task, config in resolved]
    return [
        (task, with_faults(config, draw_faults(config, options.fault_rate, _predicted_step_s(config))))
        for task, config in resolved
    ]


def _predicted_step_s(config: Any) -> float | None:
    from llmb.launch.install_root import install_root
    from llmb.perfmodel.explain.run_prediction import with_prediction

    predicted = with_prediction(config, install_root(os.environ)).predicted
    return None if predicted is None else predicted.value
