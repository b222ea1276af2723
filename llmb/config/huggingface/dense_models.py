"""Registry of the dense decoders like Llama, by architecture; one file each."""

from llmb.config.huggingface.exaone4 import EXAONE4
from llmb.config.huggingface.gemma2 import GEMMA2
from llmb.config.huggingface.gemma3 import GEMMA3
from llmb.config.huggingface.llama3 import LLAMA3
from llmb.config.huggingface.llama_like import LlamaLike
from llmb.config.huggingface.mistral import MISTRAL
from llmb.config.huggingface.olmo2 import OLMO2
from llmb.config.huggingface.olmo3 import OLMO3
from llmb.config.huggingface.phi3 import PHI3
from llmb.config.huggingface.qwen2 import QWEN2
from llmb.config.huggingface.qwen3 import QWEN3
from llmb.config.huggingface.smollm3 import SMOLLM3

DENSE_MODELS: dict[str, LlamaLike] = {
    dense.architecture: dense
    for dense in (LLAMA3, QWEN2, QWEN3, MISTRAL, SMOLLM3, PHI3, OLMO2, OLMO3, GEMMA2, GEMMA3, EXAONE4)
}
