"""Which named parameters of a Llama lie in a unit of weights, and where.

    for place in places(model, unit):
        tensors[place.tensor][place.rows] == network.get_parameter(place.name)[place.source]

`tensors` are the unit's, of its weights, their gradients or their moments: `tensors.unit_tensors`.
"""

from typing import NamedTuple

from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import Units


class Place(NamedTuple):
    """A parameter, or some rows of one, inside a unit."""

    name: str
    tensor: int  # which of the unit's
    rows: slice  # of that tensor
    source: slice  # rows of the parameter


ALL = slice(None)


def places(model: Model, unit: int) -> list[Place]:
    """Of a unit, in the order in which they lie there."""
    if unit < model.layers:
        return _of_block(model, f"layers.{unit}")
    units = Units(model)
    is_head = unit in units.head and not model.tied_embeddings
    part = unit - (units.head if is_head else units.embedding).start
    rows = units.part_rows(part)
    name = "head.weight" if is_head else "embedding.weight"
    found = [Place(name, 0, ALL, slice(rows.start, rows.stop))]
    return [*found, Place("norm.weight", 1, ALL, ALL)] if unit == units.head[-1] else found


def _of_block(model: Model, layer: str) -> list[Place]:
    heads = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
    return [
        *_stacked(0, {f"{layer}.attention.{one}.weight": count * model.head_dim for one, count in heads.items()}),
        Place(f"{layer}.attention.o.weight", 1, ALL, ALL),
        *_stacked(2, {f"{layer}.mlp.{one}.weight": model.ffn for one in ("gate", "up")}),
        Place(f"{layer}.mlp.down.weight", 3, ALL, ALL),
        Place(f"{layer}.attention_norm.weight", 4, ALL, ALL),
        Place(f"{layer}.mlp_norm.weight", 5, ALL, ALL),
    ]


def _stacked(tensor: int, rows_of: dict[str, int]) -> list[Place]:
    """Parameters whose rows lie one behind the other in one tensor."""
    found, first = [], 0
    for name, rows in rows_of.items():
        found.append(Place(name, tensor, slice(first, first + rows), ALL))
        first += rows
    return found
