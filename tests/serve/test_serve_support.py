"""Notes of a run on experts whose shards cannot be quantized."""

from dataclasses import replace

import pytest
import torch
from small_models import gpt_oss_model, qwen3_moe_model
from small_serving import CONFIG

from llmb.config.model import Model
from llmb.config.spec import Parallel
from llmb.serve.serve_support import device_fallbacks

CPU = torch.device("cpu")


def wide(model: Model, ffn: int) -> Model:
    assert model.experts is not None
    return replace(model, hidden=256, experts=replace(model.experts, ffn=ffn))


GPT_OSS = wide(gpt_oss_model(), 2880)
QWEN3 = wide(qwen3_moe_model(), 768)


@pytest.mark.parametrize(
    ("model", "dtype", "tp", "ep", "width"),
    [
        (GPT_OSS, "mxfp4", 8, 1, 360),
        (GPT_OSS, "mxfp4", 8, 4, None),
        (GPT_OSS, "bf16", 8, 1, None),
        (QWEN3, "fp8", 4, 1, 192),
        (QWEN3, "fp8", 4, 2, None),
    ],
)
def test_experts_that_are_not_quantized_are_named(model, dtype, tp, ep, width):
    precision = replace(CONFIG.precision, dtype=dtype, fp8_recipe="blockwise" if dtype == "fp8" else None)
    config = replace(CONFIG, model=model, precision=precision, parallel=Parallel(tp=tp, ep=ep))
    expected = (
        ()
        if width is None
        else (
            f"no {dtype} experts (tp={tp}, ep={ep}: shards of {width} channels are not whole groups of scales): bf16",
        )
    )
    assert device_fallbacks(config, CPU) == expected
