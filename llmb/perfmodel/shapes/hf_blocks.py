"""Blocks of a network by the fields of its config.json: attention, recurrences, experts, their order and windows.

read_experts(config, layers=48)             -> MoEConfig(count=128, top_k=8, ...), or None
read_attention_pattern(config, layers=48)   -> "DDDF"
"""

from typing import Any

from llmb.config.model import BLOCKS_BY_LETTER, DeltaNetConfig, MambaConfig, MlaConfig, Model, MoEConfig
from llmb.config.serialization import convert
from llmb.errors import ConfigError

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTHS = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
EXPERT_STEPS = (  # one layer of so many has experts
    "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval", "moe_layer_frequency", "moe_layer_freq",
)  # fmt: skip
KINDS = ("linear_attention", "full_attention")  # of `layer_types`
HYBRID_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}  # of `layers_block_type`
# Model types whose linear attention is a gated DeltaNet, and those with Mamba-2 in place of most layers' attention.
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear")
MAMBAS = ("bamba", "granitemoehybrid")
GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "afmoe")  # with a gate on its output
FULL_INTERVAL = 4  # of models with linear attention, unless they say another


def read_count(config: dict[str, Any], *names: str) -> int | None:
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


def read_required(config: dict[str, Any], name: str) -> int:
    """Return a field without which the shape is not known."""
    if (value := read_count(config, name)) is None:
        raise ConfigError(f"config.json: {name} must be a whole number, 1 or more, got {config.get(name)!r}")
    return value


def read_hybrid_pattern(config: dict[str, Any]) -> str | None:
    """Return one letter per layer of a hybrid, from hybrid_override_pattern or, in newer files, layers_block_type."""
    if not (kinds := convert(tuple[str, ...], config.get("layers_block_type") or (), "config.json: layers_block_type")):
        return convert(str | None, config.get("hybrid_override_pattern"), "config.json: hybrid_override_pattern")
    if unknown := sorted(set(kinds) - set(HYBRID_LETTERS)):
        raise ConfigError(f"config.json: layers_block_type: {', '.join(unknown)} is not modelled")
    return "".join(HYBRID_LETTERS[kind] for kind in kinds)


def read_mtp_blocks(config: dict[str, Any], model: Model) -> tuple[str, ...]:
    """Return the blocks of a pass of multi-token prediction: the hybrid's own pattern, or those of the last layer."""
    name = "mtp_hybrid_override_pattern"
    if pattern := convert(str | None, config.get(name), f"config.json: {name}"):
        if unknown := set(pattern) - set(BLOCKS_BY_LETTER):
            raise ConfigError(f"config.json: {name} must be letters of M, *, - and E, got {''.join(sorted(unknown))!r}")
        return tuple(BLOCKS_BY_LETTER[letter] for letter in pattern)
    return ("mla" if model.mla else "attention", "experts" if model.experts else "mlp")


def read_experts(config: dict[str, Any], layers: int) -> MoEConfig | None:
    """Return the mixture of experts; None: every MLP is dense."""
    count = read_count(config, *EXPERT_COUNTS)
    if count is None:
        return None
    ffn = read_count(config, "moe_intermediate_size") or read_required(config, "intermediate_size")
    if (top_k := read_count(config, *TOP_KS)) is None:
        raise ConfigError(f"config.json: a mixture of experts needs {TOP_KS[0]}, the experts of a token")
    if top_k > count:
        raise ConfigError(f"config.json: {top_k} experts per token of {count}; at most {count}")
    return MoEConfig(
        count=count,
        top_k=top_k,
        ffn=ffn,
        shared=_shared_experts(config, ffn),
        latent=read_count(config, "moe_latent_size"),
        dense_layers=_dense_layers(config, layers),
    )


def _shared_experts(config: dict[str, Any], ffn: int) -> int:
    """Return how many experts every token is routed to, as wide as the others."""
    if "llama4" in str(config.get("model_type")):
        return 1
    width = read_count(config, *SHARED_WIDTHS)
    if width and width % ffn:
        raise ConfigError(f"config.json: a shared expert {width} wide, no multiple of {ffn}, is not modelled")
    return width // ffn if width else read_count(config, *SHARED_COUNTS) or 0


def _dense_layers(config: dict[str, Any], layers: int) -> int:
    """Return the number of layers with a dense MLP in place of experts."""
    if kinds := convert(tuple[str, ...], config.get("mlp_layer_types") or (), "config.json: mlp_layer_types"):
        return kinds.count("dense")
    if leading := read_count(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        return leading + max(0, layers - 1 - (read_count(config, "moe_layer_end_index") or layers - 1))
    step = read_count(config, *EXPERT_STEPS) or 1
    dense = convert(tuple[int, ...], config.get("mlp_only_layers") or (), "config.json: mlp_only_layers")
    return layers - layers // step + len(dense)


def read_mla(config: dict[str, Any]) -> MlaConfig | None:
    """Return the latents of MLA, with the indexer of sparse attention if there is one."""
    q_rank, kv_rank = read_count(config, "q_lora_rank") or 0, read_count(config, "kv_lora_rank")
    if kv_rank is None:
        return None
    nope_dim, rope_dim, value_dim = (
        read_required(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    indexer = {}
    if read_count(config, "index_topk"):
        names = {"index_heads": "index_n_heads", "index_dim": "index_head_dim", "index_topk": "index_topk"}
        indexer = {field: read_required(config, name) for field, name in names.items()}
    return MlaConfig(
        q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim, **indexer
    )


def read_mamba(config: dict[str, Any]) -> MambaConfig | None:
    """Return the Mamba-2 mixer of Bamba and Granite 4, or of Nemotron-H."""
    if str(config.get("model_type")) in MAMBAS:
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
        chunk = read_count(config, "mamba_chunk_size")
    elif config.get("mamba_num_heads"):
        names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
        chunk = read_count(config, "chunk_size")
    else:
        return None
    heads, head_dim, groups, state = (read_required(config, name) for name in names)
    return MambaConfig(heads=heads, head_dim=head_dim, groups=groups, state=state, chunk=chunk or 128)


def read_delta_net(config: dict[str, Any]) -> DeltaNetConfig | None:
    """Return the gated DeltaNet of Qwen3-Next and its successors, OLMo Hybrid or Kimi Linear."""
    if str(config.get("model_type")) not in DELTA_NETS:
        return None
    conv = read_count(config, "linear_conv_kernel_dim") or DeltaNetConfig.conv
    if config["model_type"] == "kimi_linear":
        heads, dim = (read_required(config, name) for name in ("linear_num_heads", "linear_head_dim"))
        return DeltaNetConfig(key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, gate_rank=dim, conv=conv)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, value_heads, key_dim, value_dim = (read_required(config, name) for name in names)
    return DeltaNetConfig(key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv=conv)


def read_attention_pattern(config: dict[str, Any], layers: int) -> str:
    """Return a letter per layer: the mixer that most have, or full attention in those listed or the last of a few."""
    letter = "M" if str(config.get("model_type")) in MAMBAS else "D"
    if kinds := config.get("layer_types"):
        return "".join(letter if kind in ("linear_attention", "mamba") else "F" for kind in kinds)
    if letter == "M":
        full = convert(tuple[int, ...], config.get("attn_layer_indices") or (), "config.json: attn_layer_indices")
        return "".join("F" if layer in full else letter for layer in range(layers))
    interval = read_count(config, "full_attention_interval") or FULL_INTERVAL
    return letter * (interval - 1) + "F"
