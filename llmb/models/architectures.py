"""Registry of architectures by the name in a model.Model."""

from llmb.config.huggingface.dense_models import DENSE_MODELS
from llmb.config.huggingface.mixtures import MIXTURES
from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.decoder import Decoder
from llmb.models.deepseek import DeepSeek
from llmb.models.grok1 import Grok1
from llmb.models.llama import Llama
from llmb.models.mixture import Mixture
from llmb.models.nemotron_h import NemotronH

ARCHITECTURES = {
    **dict.fromkeys(DENSE_MODELS, Llama),
    "grok1": Grok1,
    "deepseek": DeepSeek,
    "nemotron_h": NemotronH,
    **dict.fromkeys(MIXTURES, Mixture),
}
Network = Decoder  # base class of all: embedding, layers, forward(tokens, labels) and init_weights(seed)


def build_model(model: Model) -> Network:
    """Build the network of a model on torch's current device, weights uninitialized: see `init_weights`."""
    if model.architecture not in ARCHITECTURES:
        choices = ", ".join(ARCHITECTURES)
        raise ConfigError(f"architecture {model.architecture!r} is not supported; choices are: {choices}")
    return ARCHITECTURES[model.architecture](model)
