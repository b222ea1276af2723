"""Stand-ins of true width: real layers, as many as fit, every kind of block kept."""

import pytest

from llmb.config.proxy import smaller, true_width
from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate


@pytest.mark.parametrize(
    ("workload", "size"), [("pretrain_llama3.1", "70b"), ("pretrain_nemotronh", "56b"), ("pretrain_grok1", "314b")]
)
@pytest.mark.parametrize("gib", [80.0, 139.0, 500.0])
def test_the_most_layers_that_fit_at_the_real_width(recipes, workload, size, gib):
    recipe = recipes[workload]
    asked = Request(size=size, dtype="bf16", gpus=1, gpu="h200", proxy="true-width", memory_gib=gib)
    if workload == "pretrain_nemotronh" and gib == 80.0:  # its first attention layer is the eighth, too far for 80 GiB
        with pytest.raises(ConfigError, match="does not fit at its true width, even with 8 of 118 layers"):
            resolve(recipe, asked)
        return
    config, real = resolve(recipe, asked), recipe.model(size)
    made = config.model
    assert (made.hidden, made.ffn, made.heads, made.vocab) == (real.hidden, real.ffn, real.heads, real.vocab)
    assert set(made.blocks) - {k for k, v in made.blocks.items() if v == 0} == {k for k, v in real.blocks.items() if v}
    assert made.experts is None or made.experts.count == (4 if gib == 80.0 else 8)  # layers give way before experts
    assert made.pattern is None or real.pattern.startswith(made.pattern)
    assert memory_estimate(config).total <= 0.9 * gib * GIB
    assert config.proxy.startswith("true width")
    assert config.name.endswith("_proxy")
    assert config.reference is None


def test_experts_give_way_last(recipes):
    real = recipes["inference_deepseek-r1"].model("671b")
    chain = list(smaller(real))
    assert [m.layers for m in chain[:2]] == [61, 60]
    counts = [m.experts.count for m in chain]
    assert counts == sorted(counts, reverse=True)
    last = chain[-1]
    assert (last.layers, last.experts.dense_layers, last.experts.count) == (2, 1, 16)
    assert true_width(real, lambda m: m.experts.count <= 64).experts.count == 64


def test_several_ranks_hold_more_of_it_and_keep_a_layer_for_each_stage(recipes):
    real = recipes["pretrain_llama3.1"].model("405b")

    def made(gpus, gib):
        asked = Request(
            size="405b", dtype="bf16", gpus=gpus, gpu="h100", proxy="true-width", memory_gib=gib, layout="h100"
        )
        return resolve(recipes["pretrain_llama3.1"], asked)

    one, eight = made(1, 180.0), made(8, 180.0)
    assert 1 <= one.model.layers < eight.model.layers
    assert eight.model.hidden == real.hidden
    assert eight.parallel == Parallel(tp=2, pp=2, cp=2, vp=2)
    with pytest.raises(ConfigError, match="does not fit at its true width"):
        made(8, 20.0)


def test_a_memory_is_needed(recipes):
    with pytest.raises(ConfigError, match="--device-gb"):
        resolve(recipes["pretrain_llama3.1"], Request(size="8b", dtype="bf16", gpus=1, proxy="true-width"))
