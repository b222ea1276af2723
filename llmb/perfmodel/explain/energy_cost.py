"""Energy and cost of a predicted rate of tokens, and the time, energy and cost of a whole training run.

The GPUs are taken to draw their power limit all the time, as an H200 does in training and full serving (680 to 693 of
700 W measured); hosts, network and cooling are not included. Costs are in the currency of the prices given.
"""

from dataclasses import dataclass

from llmb.perfmodel.load_metrics import cost_per_million
from llmb.perfmodel.metrics import days_to_train

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class EnergyPrices:
    """Power of a GPU and prices. Null: not given."""

    watts: float  # of one GPU
    gpu_cost_per_hour: float | None = None
    cost_per_kwh: float | None = None


@dataclass(frozen=True, kw_only=True)
class EnergyCost:
    """Energy and cost; null where no price or no number of tokens is given."""

    watts_per_gpu: float
    joules_per_million_tokens: float
    cost_per_million_tokens: float | None
    tokens_to_train: float | None = None
    days_to_train: float | None = None
    kwh_to_train: float | None = None
    cost_to_train: float | None = None


def energy_cost(gpus: int, tokens_per_s: float, prices: EnergyPrices, tokens: float | None = None) -> EnergyCost:
    """Return energy and cost of a million tokens, and of training on `tokens` tokens."""
    joules = gpus * prices.watts / tokens_per_s * 1e6
    cost = _cost_per_million(gpus, tokens_per_s, prices, joules)
    millions = None if tokens is None else tokens / 1e6
    return EnergyCost(
        watts_per_gpu=prices.watts,
        joules_per_million_tokens=joules,
        cost_per_million_tokens=cost,
        tokens_to_train=tokens,
        days_to_train=None if tokens is None else days_to_train(tokens, tokens_per_s),
        kwh_to_train=None if millions is None else millions * joules / JOULES_PER_KWH,
        cost_to_train=None if millions is None or cost is None else millions * cost,
    )


def _cost_per_million(gpus: int, tokens_per_s: float, prices: EnergyPrices, joules: float) -> float | None:
    """Return the cost of GPUs and electricity, as far as prices are given."""
    rent = cost_per_million(prices.gpu_cost_per_hour, gpus, tokens_per_s)
    electricity = None if prices.cost_per_kwh is None else joules / JOULES_PER_KWH * prices.cost_per_kwh
    return None if rent is None and electricity is None else (rent or 0.0) + (electricity or 0.0)
