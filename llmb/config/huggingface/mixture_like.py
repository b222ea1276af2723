"""Decoders whose MLPs are mixtures of experts: how config.json and weight files describe each, as data.

    QWEN3_MOE = MixtureLike(architecture="qwen3_moe", class_name="Qwen3MoeForCausalLM", expert_fields={...}, ...)

They are Llamas in all but their MLPs, and all are one network (`llmb/models/mixture.py`). A new one of this kind is a
file with a MixtureLike, listed in `mixtures.py`.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from llmb.config.huggingface.hf_fields import HfConfig, check_routing, from_hf, to_hf
from llmb.config.huggingface.llama_like import LLAMA_NAMES, LlamaLike
from llmb.config.model import Model, MoEConfig
from llmb.errors import ConfigError

MATRICES = ("gate", "up", "down")
DENSE_NAMES = {name: hf_name for name, hf_name in LLAMA_NAMES.items() if name.startswith("mlp.")}
# Our name -> name in files, of the experts of a layer; `{expert}` is the index along dimension 0 of ours.
EXPERT_NAMES = {
    "mlp.router.weight": "mlp.gate.weight",
    **{f"mlp.{matrix}.weight": f"mlp.experts.{{expert}}.{matrix}_proj.weight" for matrix in MATRICES},
}
SHARED_NAMES = {f"mlp.shared.{matrix}.weight": f"mlp.shared_experts.{matrix}_proj.weight" for matrix in MATRICES}
TRAINING_FIELDS = {"aux_loss"}  # of MoEConfig, which config.json need not express


@dataclass(frozen=True, kw_only=True)
class MixtureLike(LlamaLike):
    """Reads and writes the config.json of one architecture, whose name is its model_type, and names its tensors."""

    expert_fields: dict[str, str]  # our field of MoEConfig -> field of config.json
    experts: dict[str, Any] = field(default_factory=dict)  # fields of MoEConfig, the same in all these models
    expert_names: dict[str, str] = field(default_factory=lambda: EXPERT_NAMES)
    has_expert_stacks: bool = False  # files have all experts of a layer in one tensor, gate and up in turn
    aliases: dict[str, str] = field(default_factory=dict)  # other names that `transformers` reads -> field
    has_mtp_layers: bool = False  # files have multi-token prediction layers behind the last, which are left out

    def read(self, config: HfConfig) -> dict[str, Any]:
        """Return the fields of model.Model, or raise a ConfigError that names what is not supported."""
        config = {**self.defaults, **config}
        if "groups" in self.expert_fields:
            check_routing(config)
        return super().read(config) | {"experts": from_hf(config, self.expert_fields) | self.experts}

    def write(self, model: Model) -> HfConfig:
        """Return the config.json of a model; what it cannot express is found when it is read back."""
        return super().write(model) | to_hf(experts_of(model), self.expert_fields)

    def layer_names(self, model: Model, index: int = 0) -> dict[str, str]:
        """Map our names of the tensors of a layer to those in files."""
        names, experts = super().layer_names(model), experts_of(model)
        if index < experts.dense_layers:
            return names
        attention = {name: hf_name for name, hf_name in names.items() if name not in DENSE_NAMES}
        return attention | self.expert_names | (SHARED_NAMES if experts.shared else {})

    def check_experts(self, model: Model) -> None:
        """Raise a ConfigError if the experts have what these models do not have: it would have no name in files."""
        experts, expected = experts_of(model), MoEConfig(count=1, top_k=1, ffn=1, **self.experts)
        free = {*self.expert_fields, "renormalise", *TRAINING_FIELDS}
        checked = [each.name for each in fields(MoEConfig) if each.name not in free]
        values = {name: getattr(experts, name) for name in checked}
        wrong = [f"{name}={_text(value)}" for name, value in values.items() if value != getattr(expected, name)]
        if wrong:
            raise ConfigError(f"model {model.name}: experts of a {model.architecture} cannot have {', '.join(wrong)}")


def experts_of(model: Model) -> MoEConfig:
    """Return the experts of a mixture, or raise a ConfigError."""
    if model.experts is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} needs the field experts")
    return model.experts


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
