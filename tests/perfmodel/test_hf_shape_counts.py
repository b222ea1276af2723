"""Parameters counted from the config.json of every decoder that `transformers` has, or its refusal."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmb.errors import ConfigError
from llmb.perfmodel.params import parameters
from llmb.perfmodel.shapes.hf_shape import read_hf_shape

# Towers and projections of images and sound, which are not counted.
OTHER_TOWERS = {"gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"}
# What the installed `transformers` cannot build without more settings or packages.
NOT_BUILT = (
    ImportError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    StrictDataclassError,
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_decoders_of_transformers_are_counted_or_refused(model_type, tmp_path):
    """By the defaults of each class; norms, biases and learned positions are at most 2 % there."""
    try:
        config = AutoConfig.for_model(model_type)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except NOT_BUILT as error:
        pytest.skip(f"transformers: {error}")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict() | {"model_type": model_type}, default=str))
    try:
        model = read_hf_shape(file).model
    except ConfigError:
        return
    if model_type not in OTHER_TOWERS:
        assert parameters(model) == pytest.approx(network.num_parameters(), rel=0.02)
