"""What all parts of `infer_gpu.py` share: the device, models, rates once they are measured, tables, the JSON file."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from infer_ceilings import Rates, steady_step
from infer_rates import head_rate, products_rate
from infer_serving import Row

from llmb.report.table import render
from llmb.spec import Model

SUSTAINED_S = 1.0  # of each measured rate
TILE = 16  # tokens; a product of an odd number may be slower, and a ceiling is none then


@dataclass
class Bench:
    """One run of the program."""

    device: torch.device
    llama: Model
    deepseek: Model
    rows: tuple[Row, ...]
    parts: tuple[str, ...]
    tiny: bool
    json: Path | None
    bandwidth: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # by what was multiplied
    results: dict[str, list[Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """For which a rate is kept up."""
        return 0.02 if self.tiny else SUSTAINED_S

    @property
    def read(self) -> float:
        """The best that any of the measured ways of reading reached."""
        return max(self.bandwidth.values())

    def keep(self, part: str, *found: Any) -> None:
        """For the file; written each time, so that what was measured is there whatever follows."""
        self.results.setdefault(part, []).extend(found)
        if self.json:
            self.json.write_text(json.dumps(self.results, indent=1))

    def say(self, title: str, header: Iterable[str], rows: Iterable[Iterable[Any]], *notes: str) -> None:
        """A table with its title, the seconds that have gone by, and what a reader must know of it."""
        print(f"\n{title}   [{time.perf_counter() - self.began:.0f} s]")
        print(render(list(header), [list(row) for row in rows]))
        print("".join(f"  {note}\n" for note in notes), end="", flush=True)

    def rate(self, dtype: str, model: Model, tokens: float) -> float:
        """FLOP/s of a layer's products; measured when it is first asked for."""
        what = f"{model.name} {dtype} layer"
        return self._rate(what, tokens, lambda n, s: products_rate(model, n, dtype, self.device, s))

    def head(self, model: Model, rows: float) -> float:
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
        products, head = self.rate(row.dtype, self.llama, step.tokens), self.head(self.llama, step.samples)
        return Rates(read=self.read, products=products, head=head, bf16=self.best("bf16"))

    def best(self, dtype: str) -> float:
        """The highest rate that was measured in a format."""
        return max(rate for name, rate in self.rates.items() if dtype in name)


def in_flight(row: Row) -> int:
    """Requests at once, at most."""
    return min(row.batch, row.requests)
