"""Registry of the dense decoders like Llama, by architecture; one file each."""

from llmb.config.dense.arcee import ARCEE
from llmb.config.dense.ernie4_5 import ERNIE4_5
from llmb.config.dense.exaone4 import EXAONE4
from llmb.config.dense.gemma2 import GEMMA2
from llmb.config.dense.gemma3 import GEMMA3
from llmb.config.dense.glm import GLM
from llmb.config.dense.glm4 import GLM4
from llmb.config.dense.granite import GRANITE
from llmb.config.dense.llama3 import LLAMA3
from llmb.config.dense.mistral import MISTRAL
from llmb.config.dense.olmo2 import OLMO2
from llmb.config.dense.olmo3 import OLMO3
from llmb.config.dense.phi3 import PHI3
from llmb.config.dense.qwen2 import QWEN2
from llmb.config.dense.qwen3 import QWEN3
from llmb.config.dense.seed_oss import SEED_OSS
from llmb.config.dense.smollm3 import SMOLLM3
from llmb.config.huggingface.llama_like import LlamaLike

DENSE_MODELS: dict[str, LlamaLike] = {
    dense.architecture: dense
    for dense in (
        LLAMA3,
        QWEN2,
        QWEN3,
        MISTRAL,
        SMOLLM3,
        PHI3,
        OLMO2,
        OLMO3,
        GEMMA2,
        GEMMA3,
        EXAONE4,
        GRANITE,
        SEED_OSS,
        GLM,
        GLM4,
        ERNIE4_5,
        ARCEE,
    )
}
