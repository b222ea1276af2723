"""Stand-ins of true width: the model's real layers, as many as a memory holds, so that its kernels run at full size.

    true_width(model, fits)      # fits: Model -> bool, for instance by llmb.memory

Layers go first. Where even one layer of each kind is too large, experts go too: a layer of 256 experts takes more
memory in training than any GPU has. Widths, heads, routing and the order of layers stay as they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from llmb.errors import ConfigError
from llmb.spec import Model


def true_width(model: Model, fits: Callable[[Model], bool]) -> Model:
    """The largest of the smaller models that fits, or an error that names the smallest there is."""
    smallest = model
    for candidate in smaller(model):
        if fits(candidate):
            return candidate
        smallest = candidate
    raise ConfigError(f"{model.name} does not fit at its true width, even with {describe_change(model, smallest)}")


def smaller(model: Model) -> Iterator[Model]:
    """The model with ever fewer layers; then, at the fewest, with ever fewer experts."""
    fewest = _fewest_layers(model)
    for layers in range(model.layers, fewest - 1, -1):
        yield _with_layers(model, layers)
    least = _with_layers(model, fewest)
    experts = least.experts
    while experts is not None and experts.count // 2 >= max(2 * experts.top_k, experts.groups):
        experts = replace(experts, count=experts.count // 2)
        yield replace(least, experts=experts)


def _fewest_layers(model: Model) -> int:
    """One layer of each kind."""
    if model.pattern is not None:
        return max(model.pattern.index(kind) for kind in set(model.pattern)) + 1
    return 2 if model.experts and model.experts.dense_layers else 1


def _with_layers(model: Model, layers: int) -> Model:
    """The first layers of the stack; leading dense layers give way so that a layer of experts remains."""
    experts = model.experts
    if experts is not None:
        experts = replace(experts, dense_layers=min(experts.dense_layers, layers - 1))
    pattern = model.pattern[:layers] if model.pattern is not None else None
    return replace(model, layers=layers, pattern=pattern, experts=experts)


def describe_change(model: Model, changed: Model) -> str:
    """What a stand-in leaves out, in words."""
    words = [f"{changed.layers} of {model.layers} layers"]
    if model.experts and changed.experts and changed.experts.count != model.experts.count:
        words.append(f"{changed.experts.count} of {model.experts.count} experts")
    return ", ".join(words)
