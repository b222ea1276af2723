"""Fields of config.json: their names, and the values that must be present."""

from typing import Any

from llmb.config.serialization import convert
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.params import FP8_BLOCK

HfConfig = dict[str, Any]
LARGEST_SIZE = 2**24  # of any size: a list of layers is built from one, and vocabularies have less than a million
ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "squared_relu": "relu2"}
# Our field -> field of config.json, of every model.
SIZE_FIELDS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "tied_embeddings": "tie_word_embeddings",
}
# Of MoEConfig, in models whose router selects groups of experts first.
GROUPED_EXPERT_FIELDS = {
    "count": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "groups": "n_group",
    "top_groups": "topk_group",
    "renormalise": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}


def check_supported(config: HfConfig, values: HfConfig) -> None:
    """Reject the first field whose value is not the supported one; null is as good as an empty one."""
    for field, supported in values.items():
        value = config.get(field, supported)
        if value != supported and not (value is None and not supported):
            raise ConfigError(f"config.json: {field}={config[field]} is not supported; only {supported} is")


def check_quantization(config: HfConfig, methods: tuple[str, ...]) -> None:
    """Reject weights in a format that is not read here, by the name of its method."""
    section = convert(dict[str, Any], config.get("quantization_config") or {}, "config.json.quantization_config")
    if section and section.get("quant_method") not in methods:
        raise UnknownName("quant_method of config.json's quantization_config:", section.get("quant_method"), methods)
    section = section | ({"fmt": "e4m3"} if section.get("fmt") == "float8_e4m3fn" else {})  # of MiniMax-M2
    check_supported(section, {"weight_block_size": [FP8_BLOCK, FP8_BLOCK], "fmt": "e4m3"})


def check_routing(config: HfConfig) -> None:
    """Reject group-limited routing that leaves a token fewer experts than it is routed to."""
    names = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    count, groups, top_groups, top_k = (positive_int(config, name) for name in names)
    if top_groups > groups:
        raise ConfigError(f"config.json: topk_group={top_groups} is more than the groups, n_group={groups}")
    if top_k > count // groups * top_groups:
        raise ConfigError(
            f"config.json: num_experts_per_tok={top_k} is more than the {count // groups * top_groups} experts in "
            f"topk_group={top_groups} of n_group={groups} groups"
        )


def read_activation(config: HfConfig, field: str) -> str:
    by_hf_name = {hf_name: name for name, hf_name in ACTIVATIONS.items()}
    hf_name = str(config.get(field))
    if hf_name not in by_hf_name:
        raise UnknownName(f"{field} of config.json:", hf_name, by_hf_name)
    return by_hf_name[hf_name]


def to_hf(settings: object, names: dict[str, str]) -> HfConfig:
    """Return settings under the names of config.json; missing ones are found when it is read back."""
    return {hf_name: getattr(settings, name, None) for name, hf_name in names.items()}


def from_hf(config: HfConfig, names: dict[str, str]) -> dict[str, Any]:
    return {name: required(config, hf_name) for name, hf_name in names.items()}


def required(config: HfConfig, field: str) -> Any:
    if config.get(field) is None:
        raise ConfigError(f"config.json: field {field!r} is missing")
    return config[field]


def head_dim_of(config: HfConfig) -> int:
    """Return the channels of an attention head: of all heads the hidden size, where config.json does not say."""
    if config.get("head_dim"):
        return positive_int(config, "head_dim")
    return positive_int(config, "hidden_size") // positive_int(config, "num_attention_heads")


def positive_int(config: HfConfig, field: str) -> int:
    """Return a field that must be a positive integer."""
    number = convert(int, required(config, field), f"config.json.{field}")
    if not 1 <= number <= LARGEST_SIZE:
        raise ConfigError(f"config.json.{field}: {number} must be at least 1 and at most {LARGEST_SIZE:,}")
    return number
