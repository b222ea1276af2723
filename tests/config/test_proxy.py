"""True-width proxies: real layers, as many as fit, with every kind of block."""

import pytest

from llmb.config.proxy import reduced_models, true_width_proxy
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate


@pytest.mark.parametrize(
    ("workload", "size"), [("pretrain_llama3.1", "70b"), ("pretrain_nemotronh", "56b"), ("pretrain_grok1", "314b")]
)
@pytest.mark.parametrize("gib", [80.0, 139.0, 500.0])
def test_true_width_proxy_has_as_many_layers_as_fit(recipes, workload, size, gib):
    recipe = recipes[workload]
    request = RunRequest(size=size, dtype="bf16", gpus=1, gpu="h200", proxy="true-width", memory_gib=gib)
    if workload == "pretrain_nemotronh" and gib == 80.0:  # its first attention layer is the eighth, too far for 80 GiB
        with pytest.raises(ConfigError, match="does not fit at its true width, even with 8 of 118 layers"):
            resolve(recipe, request)
        return
    config, real = resolve(recipe, request), recipe.model(size)
    proxy = config.model
    assert (proxy.hidden, proxy.ffn, proxy.heads, proxy.vocab) == (real.hidden, real.ffn, real.heads, real.vocab)
    assert set(proxy.blocks) - {k for k, v in proxy.blocks.items() if v == 0} == {
        k for k, v in real.blocks.items() if v
    }
    assert proxy.experts is None or proxy.experts.count == (4 if gib == 80.0 else 8)  # layers give way before experts
    assert proxy.pattern is None or real.pattern.startswith(proxy.pattern)
    assert memory_estimate(config).total <= 0.9 * gib * GIB
    assert config.proxy.startswith("true width")
    assert config.name.endswith("_proxy")
    assert config.reference is None


def test_experts_are_reduced_last(recipes):
    real = recipes["inference_deepseek-r1"].model("671b")
    chain = list(reduced_models(real))
    assert [m.layers for m in chain[:2]] == [61, 60]
    counts = [m.experts.count for m in chain]
    assert counts == sorted(counts, reverse=True)
    last = chain[-1]
    assert (last.layers, last.experts.dense_layers, last.experts.count) == (2, 1, 16)
    assert true_width_proxy(real, lambda m: m.experts.count <= 64).experts.count == 64


@pytest.mark.slow
def test_more_ranks_fit_more_layers_with_one_per_stage(recipes):
    real = recipes["pretrain_llama3.1"].model("405b")

    def resolved(gpus, gib):
        request = RunRequest(
            size="405b", dtype="bf16", gpus=gpus, gpu="h100", proxy="true-width", memory_gib=gib, layout="h100"
        )
        return resolve(recipes["pretrain_llama3.1"], request)

    one_rank, eight_ranks = resolved(1, 180.0), resolved(8, 180.0)
    assert 1 <= one_rank.model.layers < eight_ranks.model.layers
    assert eight_ranks.model.hidden == real.hidden
    assert eight_ranks.parallel == Parallel(tp=2, pp=2, cp=2, vp=2)
    with pytest.raises(ConfigError, match="does not fit at its true width"):
        resolved(8, 20.0)


def test_memory_budget_is_required(recipes):
    with pytest.raises(ConfigError, match="--device-gb"):
        resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="bf16", gpus=1, proxy="true-width"))
