"""The rows of `train_gpu.py` as data, and the configurations that the engine runs for them.

Sequences a step are few, so that everything ends within minutes: the optimizer, whose cost does not depend on them, is
then a larger share of a step than in a long run, which accumulates more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmb.config.huggingface.hf_config import from_hf_config
from llmb.config.huggingface.model_recipe import model_recipe
from llmb.config.overrides import from_arguments
from llmb.config.recipe import Recipe, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import RunConfig, Training

Dtype = Literal["bf16", "fp8"]
STEPS = 100_000  # more than any row takes: who measures says when it is enough
ENDLESS = (f"steps={STEPS}", f"window=1-{STEPS}")
LLAMA, NEMOTRON = "pretrain_llama3.1", "pretrain_nemotronh"
GROK, DEEPSEEK = "pretrain_grok1", "pretrain_deepseek-v3"
QWEN3, GEMMA2 = "Qwen3-8B", "gemma-2-9b"  # no recipe: the published config.json
HF_CONFIGS: dict[str, dict[str, Any]] = {
    QWEN3: {
        "model_type": "qwen3", "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 151936,
    },
    GEMMA2: {
        "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    workload: str  # a recipe of ours, or one of HF_CONFIGS
    size: str
    dtype: Dtype
    settings: tuple[str, ...]
    true_width: bool = False  # a proxy of fewer layers
    aim: float | None = None  # tokens/s
    floor: float | None = None
    aim_share: float | None = None  # of the ceiling
    floor_share: float | None = None
    steps: int = 20  # that count, at most
    seconds: float  # from the first step on, after which no further one is begun when there are FEWEST
    kernels: bool = False  # taken apart where nobody asks for another row

    @property
    def title(self) -> str:
        return f"{self.name} {self.dtype}"


FEWEST = 3  # steps of a row
TINY_WINDOW = 16  # sliding window of a tiny model, shorter than its sequences
SEQUENCES = 6  # a step of Llama 8b at 8,192 tokens in bf16, also within less memory

NARROW = {"master_weights": "bf16", "gradients": "bf16", "moments": "bf16"}  # weights and moments rounded at random
_NARROW = (*(f"{field}={dtype}" for field, dtype in NARROW.items()), "lr=3e-6")
_FP8 = (
    "fp8_fast_accum=true",
)  # also in the backward pass, as torchao with row scales; `fp8_convergence.py` shows that it trains
_8B = ("mbs=2", "save_norm_outputs=true", "cuda_graphs=true", *_NARROW)
_8K = ("seqlen=8192", *_NARROW)
_PROXY = ("balanced_experts=true", *_NARROW)
ROWS = (
    Row(name="llama 8b 8k", workload=LLAMA, size="8b", dtype="bf16", settings=(f"gbs={SEQUENCES}", *_8B),
        aim=12_000, floor=11_600, aim_share=0.96, seconds=125, kernels=True),
    Row(name="llama 8b 8k", workload=LLAMA, size="8b", dtype="fp8", settings=("gbs=4", *_8B, *_FP8),
        aim=17_500, floor=15_500, aim_share=0.86, seconds=90, kernels=True),
    *(Row(name=f"llama 8b 8k {recipe}", workload=LLAMA, size="8b", dtype="fp8",
          settings=("gbs=4", *_8B, *(() if recipe == "blockwise" else _FP8), f"fp8_recipe={recipe}"),
          steps=8, seconds=30) for recipe in ("tensorwise_current", "rowwise", "blockwise")),
    Row(name="llama 8b 32k", workload=LLAMA, size="8b", dtype="bf16",
        settings=("seqlen=32768", "mbs=1", "gbs=1", "recompute_layers=3", *_NARROW),
        aim_share=0.95, floor_share=0.92, steps=3, seconds=14),
    Row(name="nemotron-h 8b 8k", workload=NEMOTRON, size="8b", dtype="bf16", settings=("gbs=4", *_NARROW),
        aim_share=0.85, floor_share=0.75, steps=3, seconds=9),
    Row(name="grok-1 8k", workload=GROK, size="314b", dtype="bf16", true_width=True,
        settings=("seqlen=8192", "mbs=4", "gbs=8", *_PROXY), aim_share=0.85, floor_share=0.75, steps=5, seconds=5),
    Row(name="grok-1 8k", workload=GROK, size="314b", dtype="fp8", true_width=True,
        settings=("seqlen=8192", "mbs=8", "gbs=16", *_PROXY, *_FP8),
        aim_share=0.85, floor_share=0.75, steps=5, seconds=5),
    Row(name="deepseek-v3 4k", workload=DEEPSEEK, size="671b", dtype="bf16", true_width=True,
        settings=("seqlen=4096", "mbs=8", "gbs=16", *_PROXY), aim_share=0.85, floor_share=0.75, steps=5, seconds=5),
    Row(name="deepseek-v3 4k", workload=DEEPSEEK, size="671b", dtype="fp8", true_width=True,
        settings=("seqlen=4096", "mbs=8", "gbs=32", *_PROXY, *_FP8),
        aim_share=0.85, floor_share=0.75, steps=5, seconds=5),
    Row(name="llama 1b 8k", workload=LLAMA, size="1b", dtype="bf16",
        settings=("mbs=8", "gbs=8", "cuda_graphs=true", *_NARROW),
        aim_share=0.90, floor_share=0.85, steps=6, seconds=9),
    Row(name="qwen3 8b 8k", workload=QWEN3, size="8.19b", dtype="bf16", settings=("mbs=2", "gbs=4", *_8K),
        aim_share=0.90, steps=3, seconds=14),
    Row(name="qwen3 8b 8k", workload=QWEN3, size="8.19b", dtype="fp8", settings=("mbs=2", "gbs=4", *_8K, *_FP8),
        aim_share=0.90, steps=3, seconds=14),
    Row(name="gemma2 9b 8k", workload=GEMMA2, size="9.24b", dtype="bf16", settings=("mbs=1", "gbs=4", *_8K),
        aim_share=0.90, steps=3, seconds=14),
    Row(name="gemma2 9b 8k", workload=GEMMA2, size="9.24b", dtype="fp8", settings=("mbs=1", "gbs=4", *_8K, *_FP8),
        aim_share=0.90, steps=3, seconds=14),
)  # fmt: skip
MEMORY_ROW = ROWS[0]
HOST_GIB = 24  # of the host, for what a smaller device does not hold


def without_aims(row: Row) -> Row:
    """Return the row without aims, for a tiny model."""
    return replace(row, aim=None, floor=None, aim_share=None, floor_share=None)


def configuration(row: Row, gpu: str, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of a row on this GPU; the caller's settings override the recipe."""
    overrides = tuple(from_arguments([*row.settings, *settings, *ENDLESS]))
    request = RunRequest(
        size=row.size, dtype=row.dtype, gpus=1, gpu=gpu, proxy="true-width" if row.true_width else None,
        settings=overrides,
    )  # fmt: skip
    return resolve(_recipe(row, gpu), request)


def _recipe(row: Row, gpu: str) -> Recipe:
    if row.workload in HF_CONFIGS:
        return model_recipe(from_hf_config(HF_CONFIGS[row.workload], row.workload), "train", gpu, 1)
    return load_all([shipped()])[row.workload]


def tiny_configuration(row: Row, settings: Sequence[str]) -> RunConfig:
    """Return the same structure, very small, on a CPU: shows only that it runs."""
    row_settings = ["balanced_experts=true"] if row.true_width else []
    row_settings += [setting for setting in row.settings if setting.startswith("fp8_recipe=")]
    overrides = tuple(from_arguments(["seqlen=64", "mbs=1", "gbs=2", *row_settings, *settings, *ENDLESS]))
    request = RunRequest(size=row.size, dtype=row.dtype, gpus=1, gpu="cpu", proxy="small", settings=overrides)
    config = resolve(_recipe(row, "cpu"), request)
    window = None if config.model.window is None else TINY_WINDOW
    return replace(config, model=replace(config.model, vocab=512, window=window))


def within_memory(gib: float, gpu: str, tiny: bool) -> RunConfig:
    """MEMORY_ROW out of core, of the same sequences a step, on a device of so much memory."""
    recipe = load_all([shipped()])["outofcore_llama3"]
    if tiny:
        endless = tuple(from_arguments(ENDLESS))
        return resolve(recipe, RunRequest(size="8b", dtype="bf16", gpus=1, gpu="cpu", proxy="small", settings=endless))
    overrides = (f"gbs={SEQUENCES}", "lr=3e-6", "seqlen=8192", f"host_gib={HOST_GIB}", f"device_gib={gib:g}", *ENDLESS)
    settings = tuple(from_arguments(overrides))
    return resolve(recipe, RunRequest(size="8b", dtype="bf16", gpus=1, gpu=gpu, settings=settings))


def work_of(config: RunConfig) -> Training:
    """Return the workload of a row, which is always Training."""
    assert isinstance(config.workload, Training)
    return config.workload
