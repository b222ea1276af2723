"""Shape of a model from a Hugging Face config.json: only what time and memory depend on.

    read_hf_shape(Path("config.json")).model.layers

Settings that change no count of weights or FLOPs are ignored; blocks that are not modelled are
refused by their name. The strict reader, for networks that run here, is
`config/huggingface/hf_config.py`.
"""

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmb.config.huggingface.dense_models import DENSE_MODELS
from llmb.config.huggingface.hf_config import from_hf_config
from llmb.config.huggingface.mixtures import MIXTURES
from llmb.config.model import Model
from llmb.config.serialization import convert, read_json
from llmb.errors import ConfigError
from llmb.perfmodel.shapes.hf_blocks import (
    DELTA_NETS,
    GATED_ATTENTION,
    KINDS,
    MAMBAS,
    SHARED_WIDTHS,
    read_attention_pattern,
    read_count,
    read_delta_net,
    read_experts,
    read_hybrid_pattern,
    read_mamba,
    read_mla,
    read_mtp_blocks,
    read_required,
)
from llmb.perfmodel.shapes.model_catalog import ModelShape, find_model, run_shape
from llmb.perfmodel.shapes.not_modelled import check_modelled

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Of GPT-2, MPT and DBRX, ChatGLM and OLMo.
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
# Names of other model types: GPT-2, MPT, DBRX, Bloom, Falcon, OPT, ChatGLM, Nemotron-H.
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim", "n_inner"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num", "kv_n_heads"),
    "head_dim": ("attention_head_dim", "kv_channels"),
}
# Model types with up and down projections only; those that name no width have four times the hidden size.
UNGATED = (
    "apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
    "jais2", "mpt", "nanochat", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2",
)  # fmt: skip
# Model types whose head shares the embedding's weight where config.json does not say.
TIED = (
    "biogpt", "bloom", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "falcon", "gemma",
    "gpt2", "gpt_bigcode", "granite_swa", "minicpm3", "mpt", "opt", "starcoder2", "vaultgemma", "youtu",
    *(dense.hf_type for dense in DENSE_MODELS.values() if dense.defaults.get("tie_word_embeddings")),
)  # fmt: skip
DENSE_TYPES = frozenset(dense.hf_type for dense in DENSE_MODELS.values())
CHUNKED_INTERVAL = 4  # of Llama 4: every fourth layer attends to all tokens


def find_or_read_shape(text: str, size: str = "") -> ModelShape:
    """Return the shape of a model by its name, or from a config.json or its folder.

    A slash alone makes no path: names may have their owner on Hugging Face before it.
    """
    is_path = text.endswith(".json") or text.startswith((".", os.sep)) or Path(text).is_dir()
    return read_hf_shape(Path(text)) if is_path else find_model(text, size)


def read_hf_shape(path: Path) -> ModelShape:
    """Read config.json, or the config.json of a folder."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: no such file")
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object, as a Hugging Face config.json is")
    config = _flattened(data)
    check_modelled(config, path)
    if (model := _model_here(config, DENSE_TYPES)) is not None:
        checkpoint = _checkpoint(config.get("quantization_config"))
        return replace(run_shape(model), checkpoint=checkpoint, max_positions=read_count(config, *CONTEXTS))
    if missing := [name for name in REQUIRED if config.get(name) is None]:
        raise ConfigError(f"{path} has no {', '.join(missing)}: not the config.json of a decoder-only language model")
    return _shape(config, path)


def _flattened(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model, under their usual names."""
    config = dict(data)
    for section in ("text_config", "attn_config", "ffn_config"):
        fields = data[section] if isinstance(data.get(section), dict) else {}
        config |= {name: value for name, value in fields.items() if name != "model_type" or value}
    if isinstance(data.get("text_config"), dict):
        config.pop("architectures", None)  # the class with the other towers
    for name, others in OTHER_NAMES.items():
        values = [config[other] for other in others if config.get(other) is not None]
        if values and config.get(name) is None:
            config[name] = values[0]
    if isinstance(linear := data.get("linear_attn_config"), dict):  # of Kimi Linear, which counts its layers from 1
        config["linear_num_heads"], config["linear_head_dim"] = linear.get("num_heads"), linear.get("head_dim")
        config["linear_conv_kernel_dim"] = linear.get("short_conv_kernel_size")
        full = convert(tuple[int, ...], linear.get("full_attn_layers") or (), "config.json: full_attn_layers")
        layers = read_count(config, "num_hidden_layers") or 0
        config["layer_types"] = [KINDS[layer in full] for layer in range(1, layers + 1)]
    if config.get("num_hidden_layers") is None and (blocks := config.get("layers_block_type")):
        config["num_hidden_layers"] = len(blocks)  # newer files of Nemotron-H
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = 1
    return config


def _shape(config: dict[str, Any], path: Path) -> ModelShape:
    hidden, layers, heads, vocab = (read_required(config, name) for name in REQUIRED)
    kv_heads = read_count(config, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads={kv_heads} does not divide {heads} attention heads")
    experts, model_type = read_experts(config, layers), str(config.get("model_type"))
    gated = model_type not in UNGATED
    ffn = read_count(config, "intermediate_size_mlp", "intermediate_size") or (experts.ffn if experts else None)
    if model_type == "granitemoehybrid" and experts is None:
        ffn = read_required(config, SHARED_WIDTHS[-1])
    if ffn is None and gated:
        raise ConfigError(f"{path} has no intermediate_size")
    model = Model(
        name=str(config.get("_name_or_path") or config.get("model_type") or path.parent.name or "model"),
        architecture="llama",
        layers=layers,
        hidden=hidden,
        ffn=ffn or 4 * hidden,
        gated=gated,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read_count(config, "head_dim") or hidden // heads,
        vocab=vocab,
        tied_embeddings=bool(config.get("tie_word_embeddings", model_type in TIED)),
        pattern=read_hybrid_pattern(config),
        experts=experts,
        mla=read_mla(config),
        mamba=read_mamba(config),
        delta_net=read_delta_net(config),
        attention_pattern=read_attention_pattern(config, layers) if model_type in (*DELTA_NETS, *MAMBAS) else "F",
        output_gate=model_type in GATED_ATTENTION,
    )
    window, windowed = _window(config)
    depth = read_count(config, "num_nextn_predict_layers", "mtp_num_hidden_layers") or 0
    return ModelShape(
        model=model,
        window=window,
        window_layers=windowed,
        checkpoint=_checkpoint(config.get("quantization_config")),
        expert_bias=model_type == "gpt_oss",
        mtp_depth=depth,
        mtp_blocks=read_mtp_blocks(config, model) if depth else (),
        max_positions=read_count(config, *CONTEXTS),
    )


def _model_here(config: dict[str, Any], types: Collection[str]) -> Model | None:
    """Return the model as it runs here; None: it is of another type, or has settings that only a run needs to know."""
    if config.get("model_type") not in types:
        return None
    try:
        strict = {name: value for name, value in config.items() if name != "quantization_config"}
        return from_hf_config(strict, str(config.get("_name_or_path") or config["model_type"]))
    except ConfigError:
        return None


def _window(config: dict[str, Any]) -> tuple[int | None, int]:
    """Return the tokens that a query of a windowed layer attends to, on average, and the number of such layers."""
    if (mixture := _model_here(config, MIXTURES)) is not None:
        return mixture.window, mixture.window_layers
    kinds = config.get("layer_types") or ()
    layers, chunk = read_required(config, "num_hidden_layers"), read_count(config, "attention_chunk_size")
    chunked = kinds.count("chunked_attention") if kinds else layers - layers // CHUNKED_INTERVAL
    if chunk and chunked:  # a query attends to half of its chunk
        return chunk // 2, chunked
    # The last of so many layers attends to all tokens.
    pattern = None if kinds else read_count(config, "sliding_window_pattern")
    windowed = kinds.count("sliding_attention") if kinds or not pattern else layers - layers // pattern
    return (read_count(config, "sliding_window"), windowed) if windowed else (None, 0)


def _checkpoint(quantization: object) -> str | None:
    """Return the dtype of quantized weights; None: bf16, or a format that is not known."""
    method = str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else ""
    return {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "nvfp4"}.get(method)
