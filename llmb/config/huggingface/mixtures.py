"""Registry of the decoders with a mixture of experts behind grouped-query attention, by architecture; one file each."""

from llmb.config.huggingface.mixture_like import MixtureLike
from llmb.config.mixture.dots1 import DOTS1
from llmb.config.mixture.ernie4_5_moe import ERNIE4_5_MOE
from llmb.config.mixture.glm4_moe import GLM4_MOE
from llmb.config.mixture.gpt_oss import GPT_OSS
from llmb.config.mixture.minimax_m2 import MINIMAX_M2
from llmb.config.mixture.mixtral import MIXTRAL
from llmb.config.mixture.olmoe import OLMOE
from llmb.config.mixture.qwen3_moe import QWEN3_MOE

MIXTURES: dict[str, MixtureLike] = {
    mixture.architecture: mixture
    for mixture in (MIXTRAL, QWEN3_MOE, GPT_OSS, GLM4_MOE, MINIMAX_M2, DOTS1, OLMOE, ERNIE4_5_MOE)
}
