"""Which architectures are built, by the name a spec.Model gives."""

from llmb.errors import ConfigError
from llmb.models.llama import Llama
from llmb.spec import Model

ARCHITECTURES = {"llama": Llama}
Network = Llama  # any of the above; all have embedding, layers, forward(tokens, labels) and init_weights(generator)


def build_model(model: Model) -> Network:
    """The network of a spec.Model on torch's current device, weights not yet set: see `init_weights`."""
    if model.architecture not in ARCHITECTURES:
        built = ", ".join(ARCHITECTURES)
        raise ConfigError(f"architecture {model.architecture!r} is not built yet; those which are: {built}")
    return ARCHITECTURES[model.architecture](model)
