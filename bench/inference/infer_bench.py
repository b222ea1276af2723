"""Shared state of the parts of `infer_gpu.py`: device, models, measured rates."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measure.bench_report import BenchReport

from inference.infer_ceilings import Rates, steady_step
from inference.infer_rates import BLOCKWISE, head_rate, products_rate
from inference.infer_serving import Row
from llmb.config.model import Model
from llmb.config.native.number_formats import published_fp8_recipe

SUSTAINED_S = 1.0  # of each measured rate
TILE = 16  # tokens; a GEMM of an odd number may be slower, which is no ceiling then


@dataclass
class Bench(BenchReport):
    """One run of the program."""

    device: torch.device
    llama: Model
    deepseek: Model
    rows: tuple[Row, ...]
    parts: frozenset[str]
    tiny: bool
    bandwidth: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # by GEMM

    @property
    def seconds(self) -> float:
        """Duration of the measurement of a rate."""
        return 0.02 if self.tiny else SUSTAINED_S

    @property
    def read(self) -> float:
        """The highest measured read bandwidth."""
        return max(self.bandwidth.values())

    def rate(self, dtype: str, model: Model, tokens: float) -> float:
        """Return the FLOP/s of a layer's GEMMs, measured on first use."""
        name_prefix = f"{model.name} {dtype} layer"
        return self._rate(name_prefix, tokens, lambda n, s: products_rate(model, n, dtype, self.device, s))

    def head_rate(self, model: Model, rows: float) -> float:
        """Return the FLOP/s of the head."""
        return self._rate(f"{model.name} bf16 head", rows, lambda n, s: head_rate(model, n, self.device, s))

    def _rate(self, name_prefix: str, tokens: float, measure: Callable[[int, float], float]) -> float:
        tiled = max(1, round(tokens / TILE)) * TILE
        name = f"{name_prefix}, {tiled} tokens"
        if name not in self.rates:
            self.rates[name] = measure(tiled, self.seconds)
        return self.rates[name]

    def rates_of(self, row: Row) -> Rates:
        """Return the rates for the row's average step, of GEMMs with the scales of its fp8 recipe."""
        step = steady_step(row.isl, row.osl, concurrency(row))
        recipe = row.precision.fp8_recipe or published_fp8_recipe(self.llama)
        dtype = BLOCKWISE if row.dtype == "fp8" and recipe == "blockwise" else row.dtype
        products, head = self.rate(dtype, self.llama, step.tokens), self.head_rate(self.llama, step.samples)
        return Rates(read=self.read, products=products, head=head, bf16=self.best("bf16"))

    def best(self, dtype: str) -> float:
        """Return the highest rate measured in a dtype."""
        return max(rate for name, rate in self.rates.items() if dtype in name)


def concurrency(row: Row) -> int:
    """Return the maximum number of concurrent requests."""
    return min(row.batch, row.requests)
