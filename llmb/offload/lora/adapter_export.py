"""Export of trained adapters in the layout of PEFT: adapter_model.safetensors and adapter_config.json.

    export_adapters(Path("my-adapters"), model, lora, adapters.named, base="meta-llama/Llama-3.1-70B")

`peft.PeftModel.from_pretrained(base, "my-adapters")` loads them, and so do servers that take PEFT's adapters.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from llmb.config.model import Model
from llmb.config.offload_plan import Lora
from llmb.errors import ConfigError
from llmb.models.architectures import ARCHITECTURES
from llmb.models.hf_weights import atomic_folder

MODULES = {
    "q_proj": "attention.q", "k_proj": "attention.k", "v_proj": "attention.v", "o_proj": "attention.o",
    "gate_proj": "mlp.gate", "up_proj": "mlp.up", "down_proj": "mlp.down",
}  # fmt: skip
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def check_export(model: Model) -> None:
    """Refuse a model whose projections are stacked in Hugging Face's layout: PEFT adapts them as one."""
    names: dict[str, str] = _network(model).hf_names(model)
    for projection, module in MODULES.items():
        hf_name = names[f"layers.0.{module}.weight"]
        if Counter(names.values())[hf_name] > 1 or not hf_name.endswith(f"{projection}.weight"):
            raise ConfigError(
                f"export: {model.name} has no {projection} of its own in Hugging Face's layout; leave it out"
            )


def export_adapters(folder: Path, model: Model, lora: Lora, named: dict[str, Tensor], base: str | None) -> None:
    """Write a folder that does not exist yet or is empty; `named` as in `LoraAdapters`."""
    names, layouts = _network(model).hf_names(model), _network(model).hf_layouts(model)
    tensors = {}
    for name, tensor in named.items():
        layer, projection, matrix = name.rsplit(".", 2)
        weight = f"{layer}.{MODULES[projection]}.weight"
        layout = layouts.get(weight) if matrix == "B" else None  # which only orders rows
        stem = names[weight].removesuffix(".weight")
        values = tensor.cpu() if layout is None else layout.to_hf(tensor.cpu())
        tensors[f"base_model.model.{stem}.lora_{matrix}.weight"] = values.contiguous().clone()
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(peft_config(lora, base), indent=1))


def peft_config(lora: Lora, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [*lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _network(model: Model) -> Any:
    return ARCHITECTURES[model.architecture]
