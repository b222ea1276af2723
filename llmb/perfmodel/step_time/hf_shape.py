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
from llmb.config.model import BLOCKS_BY_LETTER, DeltaNetConfig, MambaConfig, MlaConfig, Model, MoEConfig
from llmb.config.serialization import convert, read_json
from llmb.errors import ConfigError
from llmb.perfmodel.model_catalog import ModelShape, find_model, run_shape

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTHS = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
EXPERT_STEPS = (  # one layer of so many has experts
    "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval", "moe_layer_frequency", "moe_layer_freq",
)  # fmt: skip
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
HYBRID_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}  # of `layers_block_type`
KINDS = ("linear_attention", "full_attention")
ATTENTION_TYPES = (
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "mamba",
    "attention",
    *KINDS,
)  # of `layer_types`
# Model types whose linear attention is a gated DeltaNet -> they have a gate on the output of attention, too.
DELTA_NETS = {
    "qwen3_next": True, "qwen3_5_text": True, "qwen3_5_moe_text": True, "olmo_hybrid": False, "kimi_linear": False,
}  # fmt: skip
MAMBAS = ("bamba", "granitemoehybrid")  # model types with Mamba-2 in place of the attention of most layers
# Fields of config.json -> what they describe, which no cost function here counts.
NOT_MODELLED = {
    "hc_mult": "hyper-connections",
    "attn_layer_period": "Mamba layers other than Nemotron-H's",
    "state_size": "Mamba layers other than Nemotron-H's",
    "lru_width": "linear recurrences (RG-LRU)",
    "conv_L_cache": "convolutions in place of attention",
    **dict.fromkeys(("block_configs", "per_layer_config"), "layers that differ in their sizes"),
    **dict.fromkeys(
        ("hybrid_layer_pattern", "global_head_dim", "num_attention_heads_per_layer"),
        "layers that differ in their heads",
    ),
    "moe_layers_enum": "a list of the layers with experts",
    "hidden_size_per_layer_input": "embeddings of each layer",
    "zero_expert_num": "experts without weights",
    **dict.fromkeys(("use_residual", "residual_moe"), "a dense MLP beside the experts"),
    "is_encoder_decoder": "an encoder and a decoder",
}
NOT_MODELLED_TYPES = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
         "electra", "ernie", "megatron-bert", "modernbert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
         "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        "an encoder",
    ),
    "aria_text": "experts of another kind",
    "doge": "experts that are looked up",
    "hrm_text": "layers that run several times",
    "jetmoe": "attention heads that are experts",
    "moshi": "a second decoder, of audio",
    **dict.fromkeys(("afmoe", "laguna"), "attention with a gate on its output"),
}  # fmt: skip
DENSE_TYPES = frozenset(dense.hf_type for dense in DENSE_MODELS.values())
CHUNKED_INTERVAL = 4  # of Llama 4: every fourth layer attends to all tokens
FULL_INTERVAL = 4  # of models with linear attention, unless they say another


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
        layers = _count(config, "num_hidden_layers") or 0
        config["layer_types"] = [KINDS[layer in full] for layer in range(1, layers + 1)]
    if config.get("num_hidden_layers") is None and (blocks := config.get("layers_block_type")):
        config["num_hidden_layers"] = len(blocks)  # newer files of Nemotron-H
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
    model_type = str(config.get("model_type"))
    if config.get("mamba_d_state") and model_type not in MAMBAS:
        raise ConfigError(f"{path}: mamba_d_state of model_type {model_type} is not modelled, so nothing is predicted")
    if "linear_attention" in kinds and model_type not in (*DELTA_NETS, *MAMBAS):
        raise ConfigError(f"{path}: linear_attention of model_type {model_type} is not modelled")
    if "shared" in convert(tuple[str, ...], config.get("indexer_types") or (), "config.json: indexer_types"):
        raise ConfigError(f"{path}: indexer_types: an indexer of several layers is not modelled")
    if 0 in (config.get("attn_type_list") or ()):  # 1: softmax, in a MiniMax-M2 in all layers
        raise ConfigError(f"{path}: attn_type_list (linear attention) is not modelled, so nothing is predicted")
    if model_type in NOT_MODELLED_TYPES:
        block = NOT_MODELLED_TYPES[model_type]
        raise ConfigError(f"{path}: model_type {model_type} ({block}) is not modelled, so nothing is predicted")
    if config.get("v_head_dim") and not config.get("kv_lora_rank"):
        raise ConfigError(f"{path}: v_head_dim without kv_lora_rank is not modelled, so nothing is predicted")


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
    """Return the first of these fields that is given and not 0; of a list with an entry a layer, equal entries."""
    for name in names:
        if value := config.get(name):
            if isinstance(value, list):
                if len({str(entry) for entry in value}) > 1:
                    raise ConfigError(f"config.json: {name} that differs between layers is not modelled")
                value = value[0]
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
    experts, model_type = _experts(config, layers), str(config.get("model_type"))
    gated = model_type not in UNGATED
    ffn = _count(config, "intermediate_size_mlp", "intermediate_size") or (experts.ffn if experts else None)
    if model_type == "granitemoehybrid" and experts is None:
        ffn = _required(config, SHARED_WIDTHS[-1])
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
        kv_heads=_count(config, "num_key_value_heads") or heads,
        head_dim=_count(config, "head_dim") or hidden // heads,
        vocab=vocab,
        tied_embeddings=bool(config.get("tie_word_embeddings", model_type in TIED)),
        pattern=_pattern(config),
        experts=experts,
        mla=_mla(config),
        mamba=_mamba(config),
        delta_net=_delta_net(config),
        attention_pattern=_attention_pattern(config, layers) if model_type in (*DELTA_NETS, *MAMBAS) else "F",
        output_gate=DELTA_NETS.get(model_type, False),
    )
    window, windowed = _window(config)
    depth = _count(config, "num_nextn_predict_layers", "mtp_num_hidden_layers") or 0
    return ModelShape(
        model=model,
        window=window,
        window_layers=windowed,
        checkpoint=_checkpoint(config.get("quantization_config")),
        expert_bias=model_type == "gpt_oss",
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
    # The last of so many layers attends to all tokens.
    pattern = None if kinds else _count(config, "sliding_window_pattern")
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
    if (top_k := _count(config, *TOP_KS)) is None:
        raise ConfigError(f"config.json: a mixture of experts needs {TOP_KS[0]}, the experts of a token")
    return MoEConfig(
        count=count,
        top_k=top_k,
        ffn=ffn,
        shared=_shared_experts(config, ffn),
        latent=_count(config, "moe_latent_size"),
        dense_layers=_dense_layers(config, layers),
    )


def _shared_experts(config: dict[str, Any], ffn: int) -> int:
    """Return how many experts every token is routed to, as wide as the others."""
    if "llama4" in str(config.get("model_type")):
        return 1
    width = _count(config, *SHARED_WIDTHS)
    if width and width % ffn:
        raise ConfigError(f"config.json: a shared expert {width} wide, no multiple of {ffn}, is not modelled")
    return width // ffn if width else _count(config, *SHARED_COUNTS) or 0


def _dense_layers(config: dict[str, Any], layers: int) -> int:
    """Return the number of layers with a dense MLP in place of experts."""
    if kinds := convert(tuple[str, ...], config.get("mlp_layer_types") or (), "config.json: mlp_layer_types"):
        return kinds.count("dense")
    if leading := _count(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        return leading + max(0, layers - 1 - (_count(config, "moe_layer_end_index") or layers - 1))
    step = _count(config, *EXPERT_STEPS) or 1
    return layers - layers // step + len(config.get("mlp_only_layers") or ())


def _mla(config: dict[str, Any]) -> MlaConfig | None:
    q_rank, kv_rank = _count(config, "q_lora_rank") or 0, _count(config, "kv_lora_rank")
    if kv_rank is None:
        return None
    nope_dim, rope_dim, value_dim = (
        _required(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    indexer = {}
    if _count(config, "index_topk"):
        names = {"index_heads": "index_n_heads", "index_dim": "index_head_dim", "index_topk": "index_topk"}
        indexer = {field: _required(config, name) for field, name in names.items()}
    return MlaConfig(
        q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim, **indexer
    )


def _mamba(config: dict[str, Any]) -> MambaConfig | None:
    if str(config.get("model_type")) in MAMBAS:
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
        chunk = _count(config, "mamba_chunk_size")
    elif config.get("mamba_num_heads"):
        names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
        chunk = _count(config, "chunk_size")
    else:
        return None
    heads, head_dim, groups, state = (_required(config, name) for name in names)
    return MambaConfig(heads=heads, head_dim=head_dim, groups=groups, state=state, chunk=chunk or 128)


def _delta_net(config: dict[str, Any]) -> DeltaNetConfig | None:
    """Return the gated DeltaNet of Qwen3-Next and its successors, OLMo Hybrid or Kimi Linear."""
    if str(config.get("model_type")) not in DELTA_NETS:
        return None
    conv = _count(config, "linear_conv_kernel_dim") or DeltaNetConfig.conv
    if config["model_type"] == "kimi_linear":
        heads, dim = (_required(config, name) for name in ("linear_num_heads", "linear_head_dim"))
        return DeltaNetConfig(key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, gate_rank=dim, conv=conv)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, value_heads, key_dim, value_dim = (_required(config, name) for name in names)
    return DeltaNetConfig(key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv=conv)


def _attention_pattern(config: dict[str, Any], layers: int) -> str:
    """Return a letter per layer: the mixer that most have, or full attention in those listed or the last of a few."""
    letter = "M" if str(config.get("model_type")) in MAMBAS else "D"
    if kinds := config.get("layer_types"):
        return "".join(letter if kind in ("linear_attention", "mamba") else "F" for kind in kinds)
    if letter == "M":
        full = convert(tuple[int, ...], config.get("attn_layer_indices") or (), "config.json: attn_layer_indices")
        return "".join("F" if layer in full else letter for layer in range(layers))
    interval = _count(config, "full_attention_interval") or FULL_INTERVAL
    return letter * (interval - 1) + "F"
