"""Registry of architectures by the name in a model.Model."""

from llmb.config.huggingface.dense_models import DENSE_MODELS
from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.decoder import Decoder
from llmb.models.deepseek import DeepSeek
from llmb.models.gpt_oss import GptOss
from llmb.models.grok1 import Grok1
from llmb.models.llama import Llama
from llmb.models.mixtral import Mixtral
from llmb.models.nemotron_h import NemotronH
from llmb.models.qwen3_moe import Qwen3Moe

ARCHITECTURES = {
    **dict.fromkeys(DENSE_MODELS, Llama),
    "grok1": Grok1,
    "deepseek": DeepSeek,
    "nemotron_h": NemotronH,
    "mixtral": Mixtral,
    "qwen3_moe": Qwen3Moe,
    "gpt_oss": GptOss,
}
Network = Decoder  # base class of all: embedding, layers, forward(tokens, labels) and init_weights(seed)


def build_model(model: Model) -> Network:
    """Build the network of a model on torch's current device, weights uninitialized: see `init_weights`."""
    if model.architecture not in ARCHITECTURES:
        choices = ", ".join(ARCHITECTURES)
        raise ConfigError(f"architecture {model.architecture!r} is not supported; choices are: {choices}")
    return ARCHITECTURES[model.architecture](model)
