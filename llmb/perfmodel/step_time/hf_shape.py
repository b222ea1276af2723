"""Shape of a model from a Hugging Face config.json: only what time and memory depend on.

    read_hf_shape(Path("config.json")).model.layers

Settings that change no count of weights or FLOPs are ignored. `models/hf_config.py` is the strict reader, for networks
that run here.
"""

from pathlib import Path
from typing import Any

from llmb.config.serialization import read_json
from llmb.config.spec import MambaConfig, MlaConfig, Model, MoEConfig
from llmb.errors import ConfigError
from llmb.perfmodel.model_catalog import ModelShape

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
UNGATED = ("gpt2", "gpt_neox", "nemotron", "nemotron_h")  # model types with up and down projections only


def read_hf_shape(path: Path) -> ModelShape:
    """Read config.json, or the config.json of a folder."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: no such file")
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object, as a Hugging Face config.json is")
    config = {**data, **data["text_config"]} if isinstance(data.get("text_config"), dict) else data
    if missing := [name for name in REQUIRED if not isinstance(config.get(name), int)]:
        raise ConfigError(f"{path} has no whole number for {', '.join(missing)}: not a language model's config.json")
    return _shape(config, path)


def _shape(config: dict[str, Any], path: Path) -> ModelShape:
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    experts = _experts(config, layers)
    ffn = config.get("intermediate_size_mlp") or config.get("intermediate_size") or (experts.ffn if experts else None)
    if ffn is None:
        raise ConfigError(f"{path} has no intermediate_size")
    model = Model(
        name=str(config.get("_name_or_path") or config.get("model_type") or path.parent.name or "model"),
        architecture="llama",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        gated=config.get("model_type") not in UNGATED,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        pattern=config.get("hybrid_override_pattern"),
        experts=experts,
        mla=_mla(config),
        mamba=_mamba(config),
    )
    kinds = config.get("layer_types") or []
    windowed = sum(kind == "sliding_attention" for kind in kinds)
    return ModelShape(model=model, window=config.get("sliding_window") if windowed else None, window_layers=windowed)


def _experts(config: dict[str, Any], layers: int) -> MoEConfig | None:
    count = next((config[name] for name in EXPERT_COUNTS if config.get(name)), None)
    if count is None:
        return None
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared_width = config.get("moe_shared_expert_intermediate_size") or config.get("shared_expert_intermediate_size")
    shared = shared_width // ffn if shared_width else config.get("n_shared_experts") or 0
    if "llama4" in str(config.get("model_type")):
        shared = 1
    step = config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1
    dense = config.get("first_k_dense_replace") or layers - layers // step
    top_k = config.get("num_experts_per_tok") or config.get("top_k_experts") or 1
    return MoEConfig(count=count, top_k=top_k, ffn=ffn, shared=shared, dense_layers=dense)


def _mla(config: dict[str, Any]) -> MlaConfig | None:
    if not config.get("kv_lora_rank") or not config.get("q_lora_rank"):
        return None
    return MlaConfig(
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )


def _mamba(config: dict[str, Any]) -> MambaConfig | None:
    if not config.get("mamba_num_heads"):
        return None
    return MambaConfig(
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        groups=config["n_groups"],
        state=config["ssm_state_size"],
        chunk=config.get("chunk_size") or 128,
    )
