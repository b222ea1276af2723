"""Options that price a prediction: power and cost of a GPU, price of electricity, tokens to train on."""

import argparse
import math
from typing import Any

HELP = {
    "--watts": ("W", "power limit of a GPU, which also slows training; default: its nominal one"),
    "--gpu-cost-per-hour": ("COST", "of one GPU: gives the cost per million tokens"),
    "--cost-per-kwh": ("COST", "of electricity, in the same currency"),
    "--tokens": ("N", "train: tokens of the whole run, such as 15e12: gives days, energy and cost"),
}


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """Add --watts, --gpu-cost-per-hour, --cost-per-kwh and --tokens."""
    for flag, (metavar, text) in HELP.items():
        parser.add_argument(flag, type=float, metavar=metavar, help=text)


def energy_of(options: argparse.Namespace, gpu: str, gpus: int, tokens_per_s: float) -> Any:
    """Return the EnergyCost of a predicted rate; None: the power of the GPU is not known, and --watts does not say."""
    from llmb.perfmodel import hardware
    from llmb.perfmodel.explain.energy_cost import EnergyPrices, energy_cost

    fabric = hardware.gpu(gpu).fabric
    limits = [watts for watts in (options.watts, fabric and fabric.watts) if watts]
    if not limits:
        return None
    prices = EnergyPrices(
        watts=min(limits),
        gpu_cost_per_hour=options.gpu_cost_per_hour,
        cost_per_kwh=options.cost_per_kwh,
    )
    return energy_cost(gpus, tokens_per_s, prices, options.tokens)


def cost_of(options: argparse.Namespace, gpu: str, gpus: int, tokens_per_s: float) -> float | None:
    """Return the cost of a million tokens; None: no price is given."""
    energy = energy_of(options, gpu, gpus, tokens_per_s)
    return None if energy is None else energy.cost_per_million_tokens


def check_prices(options: argparse.Namespace) -> None:
    """Refuse prices, power and tokens that are not above zero."""
    from llmb.errors import ConfigError

    for flag in HELP:
        value = _value(options, flag)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag} must be a number above 0, got {value:g}")


def _value(options: argparse.Namespace, flag: str) -> float | None:
    value: float | None = getattr(options, flag[2:].replace("-", "_"))
    return value
