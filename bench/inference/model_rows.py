"""Models and rows of `models_gpu.py`: published shapes, lengths and figures.

Figures are output tokens/s of TensorRT-LLM 1.1 on one H200, offline, from its performance overview; those of Llama 3.3
70B are per GPU of two (tensor parallel). Batches are the largest whose whole requests fit beside the weights.
"""

from dataclasses import dataclass, replace
from typing import Any

from inference.infer_serving import Row
from llmb.config.huggingface.hf_config import from_hf_config
from llmb.config.model import Model
from llmb.config.spec import Fp8Recipe, Precision

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip
QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 25600,
    "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "vocab_size": 151936,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128, "vocab_size": 201088,
}  # fmt: skip
CONFIGS = {
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128},
    "Llama-3.3-70B": LLAMA_70B,
    "Qwen3-32B": QWEN3_32B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
}
MODELS: dict[str, Model] = {name: from_hf_config(config, name) for name, config in CONFIGS.items()}


@dataclass(frozen=True, kw_only=True)
class ModelRow(Row):
    """A row of the table, of one of several models."""

    model: str
    aim_ratio: float | None = None  # of the ceiling
    floor_ratio: float | None = None
    fp8_recipe: Fp8Recipe | None = None  # none: as the model is published

    @property
    def title(self) -> str:
        return f"{self.model} {super().title}"

    @property
    def precision(self) -> Precision:
        return replace(super().precision, fp8_recipe=self.fp8_recipe)


def _gpt_oss(model: str, isl: int, osl: int, batch: int, requests: int, budget: int, published: float) -> ModelRow:
    """The aim is the published figure, the floor 0.8 of it."""
    return ModelRow(
        model=model, dtype="mxfp4", isl=isl, osl=osl, batch=batch, budget=budget, requests=requests,
        published=published, aim=published, floor=0.8 * published,
    )  # fmt: skip


def _llama(isl: int, osl: int, batch: int, requests: int, budget: int, published: float, **aims: float) -> ModelRow:
    return ModelRow(
        model="Llama-3.3-70B", dtype="fp8", isl=isl, osl=osl, batch=batch, budget=budget, requests=requests,
        published=published, aim=aims.get("aim"), floor=aims.get("floor"), aim_ratio=aims.get("aim_ratio"),
    )  # fmt: skip


# Requests are as many as a few minutes allow.
ROWS = (
    _gpt_oss("gpt-oss-20b", 1000, 1000, 1024, 2048, 8192, 13_858),
    _gpt_oss("gpt-oss-20b", 1024, 8192, 448, 448, 8192, 12_743),
    _gpt_oss("gpt-oss-20b", 8192, 1024, 448, 448, 16384, 4_015),
    _gpt_oss("gpt-oss-20b", 32768, 1024, 128, 128, 33280, 915),
    _gpt_oss("gpt-oss-120b", 1000, 1000, 768, 768, 16384, 6_868),
    _gpt_oss("gpt-oss-120b", 1024, 8192, 384, 384, 8192, 3_543),
    _gpt_oss("gpt-oss-120b", 8192, 1024, 256, 256, 16384, 1_828),
    _gpt_oss("gpt-oss-120b", 32768, 1024, 64, 64, 33280, 519),
    _llama(1000, 1000, 176, 352, 4096, 2_587, aim=2_600, floor=2_000, aim_ratio=0.8),
    _llama(1024, 8192, 38, 38, 4096, 2_009),
    _llama(8192, 1024, 38, 76, 8448, 537),
    _llama(32768, 1024, 10, 20, 33280, 120),
    *(
        ModelRow(
            model=model, dtype="fp8", isl=1000, osl=1000, batch=batch, budget=budget, requests=2 * batch,
            aim_ratio=0.8, floor_ratio=0.65,
        )
        for model, batch, budget in (("Qwen3-32B", 352, 8192), ("Qwen3-30B-A3B", 896, 16384))
    ),
)  # fmt: skip


def tiny_model(model: Model) -> Model:
    """Return a very small model of the same structure."""
    sizes = {"layers": 2, "hidden": 128, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 512}
    experts = None if model.experts is None else replace(model.experts, count=8, top_k=2, ffn=128)
    return replace(model, experts=experts, **sizes)  # type: ignore[arg-type]


def tiny_row(row: ModelRow) -> ModelRow:
    return replace(row, isl=32, osl=12, batch=4, budget=48, requests=12)


def changed_row(row: ModelRow, budget: int | None, fp8_recipe: Fp8Recipe | None) -> ModelRow:
    """Return the row with another token budget of a step, or other scales of fp8 GEMMs where it has some."""
    recipe = fp8_recipe if row.dtype == "fp8" else None
    return replace(row, budget=budget or row.budget, fp8_recipe=recipe)
