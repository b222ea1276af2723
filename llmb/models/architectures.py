"""Which architectures are built, by the name a spec.Model gives."""

from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.models.decoder import Decoder
from llmb.models.deepseek import DeepSeek
from llmb.models.grok1 import Grok1
from llmb.models.llama import Llama
from llmb.models.nemotron_h import NemotronH

ARCHITECTURES = {"llama": Llama, "grok1": Grok1, "deepseek": DeepSeek, "nemotron_h": NemotronH}
Network = Decoder  # what all of them are: embedding, layers, forward(tokens, labels) and init_weights(generator)


def build_model(model: Model) -> Network:
    """The network of a spec.Model on torch's current device, weights not yet set: see `init_weights`."""
    if model.architecture not in ARCHITECTURES:
        built = ", ".join(ARCHITECTURES)
        raise ConfigError(f"architecture {model.architecture!r} is not built yet; those which are: {built}")
    return ARCHITECTURES[model.architecture](model)
