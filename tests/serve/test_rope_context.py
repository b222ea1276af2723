"""RoPE whose frequencies depend on the longest sequence of a run (longrope): every engine takes those of its run."""

from dataclasses import replace

import pytest
import torch
from dense_cases import DENSE_CASES
from reference_training import LEAST
from small_served import SINGLE_RANK_INFO, config_of

from llmb.config.huggingface.hf_config import from_hf_config
from llmb.config.model import Model
from llmb.config.proxy import small_proxy
from llmb.config.spec import Training
from llmb.errors import ConfigError
from llmb.models.architectures import build_model
from llmb.models.blocks import RotaryPairs
from llmb.offload.chunked_batches import ChunkedBatches
from llmb.serve.engine_builder import build_engine
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallelize import build_meta_parts

LONGROPE: Model = next(model for model in DENSE_CASES if model.name == "longrope-partial-rotary")
ORIGINAL = 8
MODEL = replace(LONGROPE, rope=replace(LONGROPE.rope, original_tokens=ORIGINAL))
# rope_scaling and lengths of Phi-4-mini; the factors are other numbers.
PHI_4_MINI = {
    "model_type": "phi3", "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192, "hidden_act": "silu",
    "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131_072, "sliding_window": 262_144, "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + n for n in range(48)]},
}  # fmt: skip


def frequencies(context_tokens: int) -> torch.Tensor:
    return RotaryPairs.of(MODEL.rope, MODEL.head_dim, torch.device("cpu"), context_tokens).frequencies_D


@pytest.mark.parametrize(("tokens", "other_tokens"), [(ORIGINAL, ORIGINAL + 1), (ORIGINAL + 1, ORIGINAL)])
def test_engines_take_the_factors_of_their_longest_sequence(tokens: int, other_tokens: int) -> None:
    expected = frequencies(tokens)
    assert not torch.equal(expected, frequencies(other_tokens))
    engine = build_engine(config_of(MODEL, None), SINGLE_RANK_INFO, max_seq_len=tokens)
    assert torch.equal(engine.runner.model.rotary.frequencies_D, expected)
    training = Training(seqlen=tokens, mbs=1, gbs=1, ga=1, lr=1e-3)
    config = replace(config_of(MODEL, None), workload=training)
    (network,) = build_meta_parts(config, training, Mesh(0, 1, torch.device("cpu")))
    factors = torch.tensor([MODEL.rope.attention_factor] * 3 + [1.0])  # of a head's 4 pairs 3 rotate
    shard_cos_TD, _ = network.rope_tables(torch.zeros(1, 2, 1))["F"]  # two tokens of a longer sequence
    torch.testing.assert_close(shard_cos_TD, (torch.arange(2)[:, None] * expected).cos() * factors)
    batches = ChunkedBatches(
        MODEL, replace(LEAST, seqlen=tokens, chunk_tokens=tokens), 0, None, False, torch.device("cpu")
    )
    cos_TD, _ = batches.rope_rows(batches.step(1)[0], slice(0, tokens))
    torch.testing.assert_close(cos_TD, (torch.arange(tokens)[:, None] * expected).cos() * factors)


def test_config_of_phi_4_mini_and_its_proxy() -> None:
    model = from_hf_config(PHI_4_MINI)
    assert (model.rope.scaling, model.rope.original_tokens, model.rope.factor) == ("longrope", 4096, 32.0)
    assert model.rope.attention_factor == pytest.approx(1.190238)  # sqrt(1 + ln 32 / ln 4096)
    assert len(model.rope.long_factors) == 48
    proxy = small_proxy(model)
    assert len(proxy.rope.long_factors) == int(proxy.head_dim * 0.75) // 2
    build_model(proxy)
    with pytest.raises(ConfigError, match=r"longrope needs 48 short_factors and long_factors, .* not 48 and 47"):
        build_model(replace(model, rope=replace(model.rope, long_factors=model.rope.long_factors[1:])))
