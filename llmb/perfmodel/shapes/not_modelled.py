"""Blocks that no cost function counts, by the fields of config.json that describe them."""

from pathlib import Path
from typing import Any

from llmb.config.serialization import convert
from llmb.errors import ConfigError
from llmb.perfmodel.shapes.hf_blocks import DELTA_NETS, KINDS, MAMBAS

# Of `layer_types`.
ATTENTION_TYPES = ("sliding_attention", "chunked_attention", "indexed_attention", "mamba", "attention", *KINDS)
RECURRENCES = {"linear_attention": (*DELTA_NETS, *MAMBAS), "mamba": MAMBAS}  # of model types that have a cost function
# Fields of config.json -> what they describe, which no cost function counts.
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
    "laguna": "attention with a gate on its output",
}  # fmt: skip


def check_modelled(config: dict[str, Any], path: Path) -> None:
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
    for kind, types in RECURRENCES.items():
        if kind in kinds and model_type not in types:
            raise ConfigError(f"{path}: layer_types: {kind} of model_type {model_type} is not modelled")
    if "shared" in convert(tuple[str, ...], config.get("indexer_types") or (), "config.json: indexer_types"):
        raise ConfigError(f"{path}: indexer_types: an indexer of several layers is not modelled")
    # 1 is softmax: all layers of a MiniMax-M2.
    if 0 in convert(tuple[int, ...], config.get("attn_type_list") or (), "config.json: attn_type_list"):
        raise ConfigError(f"{path}: attn_type_list (linear attention) is not modelled, so nothing is predicted")
    if model_type in NOT_MODELLED_TYPES:
        block = NOT_MODELLED_TYPES[model_type]
        raise ConfigError(f"{path}: model_type {model_type} ({block}) is not modelled, so nothing is predicted")
    if config.get("v_head_dim") and not config.get("kv_lora_rank"):
        raise ConfigError(f"{path}: v_head_dim without kv_lora_rank is not modelled, so nothing is predicted")
