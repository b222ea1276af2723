"""Which number formats a run's precision means: of the stream, of linear layers, of the cache."""

import torch

from llmb.config.spec import RunConfig
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import How

FP8: dict[str, Format] = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}


def how_of(config: RunConfig) -> How:
    """The formats; fp8 weights are scaled as their model is published unless the run says otherwise."""
    precision = config.precision
    dtype = torch.float32 if precision.dtype == "fp32" else torch.bfloat16
    published = "block" if config.model.architecture == "deepseek" else "channel"
    formats: dict[str, Format] = {"fp8": FP8[precision.fp8_scaling or published], "nvfp4": "nvfp4"}
    kv_dtype = torch.float8_e4m3fn if precision.kv_dtype == "fp8" else dtype
    return How(dtype, formats.get(precision.dtype, "plain"), kv_dtype)
