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
from llmb.config.model import BLOCKS_BY_LETTER, MambaConfig, MlaConfig, Model, MoEConfig
from llmb.config.serialization import convert, read_json
from llmb.errors import ConfigError
from llmb.perfmodel.model_catalog import ModelShape, find_model, run_shape

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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
    "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron",
    "nemotron_h", "opt", "persimmon", "phi", "starcoder2",
)  # fmt: skip
HYBRID_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}  # of `layers_block_type`
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")  # of `layer_types`
# Fields of config.json -> what they describe, which no cost function here counts.
NOT_MODELLED = {
    "index_topk": "sparse attention with an indexer",
    "linear_attn_config": "linear attention",
    "linear_num_value_heads": "linear attention (gated delta net)",
    "attn_type_list": "linear attention",
    "mamba_d_state": "Mamba layers other than Nemotron-H's",
    "attn_layer_period": "Mamba layers other than Nemotron-H's",
    "state_size": "Mamba layers other than Nemotron-H's",
    "block_configs": "layers that differ in their sizes",
    "is_encoder_decoder": "an encoder and a decoder",
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert", "deberta", "deberta-v2")
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
    _check_modelled(config, path)
    if (model := _model_here(config, DENSE_TYPES)) is not None:
        return replace(run_shape(model), checkpoint=_checkpoint(config.get("quantization_config")))
    if missing := [name for name in REQUIRED if config.get(name) is None]:
        raise ConfigError(f"{path} has no {', '.join(missing)}: not the config.json of a decoder-only language model")
    return _shape(config, path)


def _flattened(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model, under their usual names."""
    config = dict(data)
    for section in ("text_config", "attn_config", "ffn_config"):
        config |= data[section] if isinstance(data.get(section), dict) else {}
    for name, others in OTHER_NAMES.items():
        values = [config[other] for other in others if config.get(other) is not None]
        if values and config.get(name) is None:
            config[name] = values[0]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = 1
    return config


def _check_modelled(config: dict[str, Any], path: Path) -> None:
    """Refuse blocks that are not modelled, by the field that describes them."""
    for name, feature in NOT_MODELLED.items():
        if config.get(name):
            raise ConfigError(f"{path}: {name} ({feature}) is not modelled, so nothing is predicted")
    kinds = convert(tuple[str, ...], config.get("layer_types") or (), "config.json: layer_types")
    if unknown := sorted(set(kinds) - set(ATTENTION_TYPES)):
        raise ConfigError(f"{path}: layer_types: {', '.join(unknown)} is not modelled, so nothing is predicted")
    if config.get("model_type") in ENCODERS:
        raise ConfigError(f"{path}: model_type {config['model_type']}: an encoder is not modelled")


def _model_here(config: dict[str, Any], types: Collection[str]) -> Model | None:
    """Return the model as it runs here; None: it is of another type, or has settings that only a run needs to know."""
    if config.get("model_type") not in types:
        return None
    try:
        strict = {name: value for name, value in config.items() if name != "quantization_config"}
        return from_hf_config(strict, str(config.get("_name_or_path") or config["model_type"]))
    except ConfigError:
        return None


def _count(config: dict[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is given and not 0."""
    for name in names:
        if value := config.get(name):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"config.json: {name}={value!r} is not a whole number, 1 or more")
            return value
    return None


def _required(config: dict[str, Any], name: str) -> int:
    """Return a field without which the shape is not known."""
    if (value := _count(config, name)) is None:
        raise ConfigError(f"config.json: {name} must be a whole number, 1 or more, got {config.get(name)!r}")
    return value


def _shape(config: dict[str, Any], path: Path) -> ModelShape:
    hidden, layers, heads, vocab = (_required(config, name) for name in REQUIRED)
    kv_heads = _count(config, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads={kv_heads} does not divide {heads} attention heads")
    experts = _experts(config, layers)
    gated = config.get("model_type") not in UNGATED
    ffn = _count(config, "intermediate_size_mlp", "intermediate_size") or (experts.ffn if experts else None)
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
        head_dim=_count(config, "head_dim") or hidden // heads,
        vocab=vocab,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        pattern=_pattern(config),
        experts=experts,
        mla=_mla(config),
        mamba=_mamba(config),
    )
    window, windowed = _window(config)
    depth = _count(config, "num_nextn_predict_layers") or 0
    return ModelShape(
        model=model,
        window=window,
        window_layers=windowed,
        checkpoint=_checkpoint(config.get("quantization_config")),
        expert_bias=config.get("model_type") == "gpt_oss",
        mtp_depth=depth,
        mtp_blocks=_mtp_blocks(config, model) if depth else (),
    )


def _pattern(config: dict[str, Any]) -> str | None:
    """Return one letter per layer of a hybrid, from hybrid_override_pattern or, in newer files, layers_block_type."""
    if not (kinds := convert(tuple[str, ...], config.get("layers_block_type") or (), "config.json: layers_block_type")):
        return convert(str | None, config.get("hybrid_override_pattern"), "config.json: hybrid_override_pattern")
    if unknown := sorted(set(kinds) - set(HYBRID_LETTERS)):
        raise ConfigError(f"config.json: layers_block_type: {', '.join(unknown)} is not modelled")
    return "".join(HYBRID_LETTERS[kind] for kind in kinds)


def _window(config: dict[str, Any]) -> tuple[int | None, int]:
    """Return the tokens that a query of a windowed layer attends to, on average, and the number of such layers."""
    if (mixture := _model_here(config, MIXTURES)) is not None:
        return mixture.window, mixture.window_layers
    kinds = config.get("layer_types") or ()
    layers, chunk = _required(config, "num_hidden_layers"), _count(config, "attention_chunk_size")
    chunked = kinds.count("chunked_attention") if kinds else layers - layers // CHUNKED_INTERVAL
    if chunk and chunked:  # a query attends to half of its chunk
        return chunk // 2, chunked
    pattern = _count(config, "sliding_window_pattern")  # the last of so many layers attends to all tokens
    windowed = kinds.count("sliding_attention") if kinds or not pattern else layers - layers // pattern
    return (_count(config, "sliding_window"), windowed) if windowed else (None, 0)


def _mtp_blocks(config: dict[str, Any], model: Model) -> tuple[str, ...]:
    """Return the blocks of a pass of multi-token prediction: the hybrid's own pattern, or those of the last layer."""
    name = "mtp_hybrid_override_pattern"
    if pattern := convert(str | None, config.get(name), f"config.json: {name}"):
        if unknown := set(pattern) - set(BLOCKS_BY_LETTER):
            raise ConfigError(f"config.json: {name} must be letters of M, *, - and E, got {''.join(sorted(unknown))!r}")
        return tuple(BLOCKS_BY_LETTER[letter] for letter in pattern)
    return ("mla" if model.mla else "attention", "experts" if model.experts else "mlp")


def _checkpoint(quantization: object) -> str | None:
    """Return the dtype of quantized weights; None: bf16, or a format that is not known."""
    method = str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else ""
    return {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "nvfp4"}.get(method)


def _experts(config: dict[str, Any], layers: int) -> MoEConfig | None:
    count = _count(config, *EXPERT_COUNTS)
    if count is None:
        return None
    ffn = _count(config, "moe_intermediate_size") or _required(config, "intermediate_size")
    shared_width = _count(config, "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    shared = shared_width // ffn if shared_width else _count(config, "n_shared_experts") or 0
    if "llama4" in str(config.get("model_type")):
        shared = 1
    step = _count(config, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    dense = _count(config, "first_k_dense_replace") or layers - layers // step + len(
        config.get("mlp_only_layers") or ()
    )
    top_k = _count(config, "num_experts_per_tok", "top_k_experts", "moe_top_k") or 1
    if top_k > count:
        raise ConfigError(f"config.json: {top_k} experts per token of {count}; at most {count}")
    latent = _count(config, "moe_latent_size")
    return MoEConfig(count=count, top_k=top_k, ffn=ffn, shared=shared, latent=latent, dense_layers=dense)


def _mla(config: dict[str, Any]) -> MlaConfig | None:
    q_rank, kv_rank = _count(config, "q_lora_rank") or 0, _count(config, "kv_lora_rank")
    if kv_rank is None:
        return None
    nope_dim, rope_dim, value_dim = (
        _required(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return MlaConfig(q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim)


def _mamba(config: dict[str, Any]) -> MambaConfig | None:
    heads = _count(config, "mamba_num_heads")
    if heads is None:
        return None
    head_dim, groups, state = (_required(config, name) for name in ("mamba_head_dim", "n_groups", "ssm_state_size"))
    chunk = _count(config, "chunk_size") or 128
    return MambaConfig(heads=heads, head_dim=head_dim, groups=groups, state=state, chunk=chunk)
