"""What all parts of `infer_gpu.py` share: the device, models, rates once they are measured."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from findings import Findings
from infer_ceilings import Rates, steady_step
from infer_rates import head_rate, products_rate
from infer_serving import Row

from llmb.config.spec import Model

SUSTAINED_S = 1.0  # of each measured rate
TILE = 16  # tokens; a product of an odd number may be slower, and a ceiling is none then


@dataclass
class Bench(Findings):
    """One run of the program."""

    device: torch.device
    llama: Model
    deepseek: Model
    rows: tuple[Row, ...]
    parts: frozenset[str]
    tiny: bool
    bandwidth: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # by what was multiplied

    @property
    def seconds(self) -> float:
        """For which a rate is kept up."""
        return 0.02 if self.tiny else SUSTAINED_S

    @property
    def read(self) -> float:
        """The best that any of the measured ways of reading reached."""
        return max(self.bandwidth.values())

    def rate(self, dtype: str, model: Model, tokens: float) -> float:
        """FLOP/s of a layer's products; measured when it is first asked for."""
        what = f"{model.name} {dtype} layer"
        return self._rate(what, tokens, lambda n, s: products_rate(model, n, dtype, self.device, s))

    def head_rate(self, model: Model, rows: float) -> float:
        """The same of the head."""
        return self._rate(f"{model.name} bf16 head", rows, lambda n, s: head_rate(model, n, self.device, s))

    def _rate(self, what: str, tokens: float, measured: Callable[[int, float], float]) -> float:
        tiled = max(1, round(tokens / TILE)) * TILE
        name = f"{what}, {tiled} tokens"
        if name not in self.rates:
            self.rates[name] = measured(tiled, self.seconds)
        return self.rates[name]

    def rates_of(self, row: Row) -> Rates:
        """For the row's average step."""
        step = steady_step(row.isl, row.osl, in_flight(row))
        products, head = self.rate(row.dtype, self.llama, step.tokens), self.head_rate(self.llama, step.samples)
        return Rates(read=self.read, products=products, head=head, bf16=self.best("bf16"))

    def best(self, dtype: str) -> float:
        """The highest rate that was measured in a format."""
        return max(rate for name, rate in self.rates.items() if dtype in name)


def in_flight(row: Row) -> int:
    """Requests at once, at most."""
    return min(row.batch, row.requests)
