"""A layer's matrices in 8 bits, and the scales of all that meets them.

    fp8_weights = Fp8Weights(model, device)
    layer = fp8_weights.of(3, "forward", weights)       # weights: a BlockWeights, in bf16
    layer.rows("w2"), layer.columns("w2")
    fp8_weights.scales.roll()                           # once a step

There is memory for one layer, since the layers are gone through one after another, all chunks of a round in each. A
matrix is cast when a form of it is first asked for, and again when another layer, or the other way, begins: in between
lies whatever changes weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from llmb.config.llama_layer_shapes import check_fp8_widths, layer_weight_shapes
from llmb.config.spec import Model
from llmb.models.llama_layer.layer_tensors import BlockWeights
from llmb.ops.gemm.fp8_linear import E5M2, Fp8
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import Scales
from llmb.ops.quant.fp8_quant import Gauge, cast_both

Way = Literal["forward", "backward"]
LayerScales = Scales[tuple[int, str]]  # by layer and name
MATRICES = ("wqkv", "wo", "w13", "w2")
ACTIVATIONS = ("x1", "attn", "x2", "act")  # inputs of these
SLOPES = ("dqkv", "dresid", "dh13", "dout")  # of their outputs
FORMATS = {**dict.fromkeys((*MATRICES, *ACTIVATIONS), E4M3), **dict.fromkeys(SLOPES, E5M2)}


class Fp8Layer:
    """What `fp8_linears.py` takes for the weights of a layer."""

    def __init__(
        self, layer: int, weights: BlockWeights, scales: LayerScales, rows: list[Tensor], columns: list[Tensor]
    ):
        self.weights = weights  # where they are now: between two chunks they may have moved
        self._layer, self.scales = layer, scales
        self._rows, self._columns = (dict(zip(MATRICES, forms, strict=True)) for forms in (rows, columns))
        self._made: dict[tuple[str, str], Fp8] = {}

    @property
    def norm1_C(self) -> Tensor:
        return self.weights.norm1_C

    @property
    def norm2_C(self) -> Tensor:
        return self.weights.norm2_C

    def gauges(self, *names: str, look: Callable[..., None]) -> tuple[Gauge, ...]:
        """Of tensors of this layer; see `Scales.gauges`."""
        return self.scales.gauges(*((self._layer, name) for name in names), look=look)

    def rows(self, name: str) -> Fp8:
        """A matrix as products going forward take it."""
        return self._form(name, "rows")

    def columns(self, name: str) -> Fp8:
        """A matrix as products going back take it."""
        return self._form(name, "columns")

    def renew(self) -> None:
        """All matrices in both forms, by what they are now: for who has memory for those of every layer."""
        for name, plain in zip(MATRICES, self.weights, strict=False):
            (gauge,) = self.gauges(name, look=partial(cast_both, plain))
            rows, columns = self._rows[name], self._columns[name]
            cast_both(plain, gauge, rows, columns)
            self._made[name, "rows"] = self._made[name, "columns"] = Fp8(rows, columns, gauge.scale)

    def _form(self, name: str, form: str) -> Fp8:
        if (name, form) not in self._made:
            plain = self.weights[MATRICES.index(name)]
            (gauge,) = self.gauges(name, look=lambda gauge: cast_both(plain, gauge))
            empty = self._rows[name].new_empty(0)
            if form == "rows":
                made = Fp8(self._rows[name], empty, gauge.scale)
                cast_both(plain, gauge, made.rows)
            else:
                made = Fp8(empty, self._columns[name], gauge.scale)
                cast_both(plain, gauge, None, made.columns)
            self._made[name, form] = made
        return self._made[name, form]


class Fp8Weights:
    """Of a model."""

    def __init__(self, model: Model, device: torch.device):
        check_fp8_widths(model)
        names = {(layer, name): dtype for layer in range(model.layers) for name, dtype in FORMATS.items()}
        self.scales = Scales(names, device)
        shapes = layer_weight_shapes(model)[: len(MATRICES)]
        self._rows = [torch.empty(shape, dtype=E4M3, device=device) for shape in shapes]
        self._columns = [torch.empty(shape[::-1], dtype=E4M3, device=device) for shape in shapes]
        self._at: tuple[int, Way] | None = None
        self._layer: Fp8Layer | None = None

    def of(self, layer: int, way: Way, weights: BlockWeights) -> Fp8Layer:
        """The weights of a layer, on the way there or back."""
        if self._layer is None or self._at != (layer, way):
            self._layer = Fp8Layer(layer, weights, self.scales, self._rows, self._columns)
            self._at = (layer, way)
        self._layer.weights = weights
        return self._layer
