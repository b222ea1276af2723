"""Launches of serving: steps of whole models, of a few layers at full width, as the engine computes them.

Every step that has a CUDA graph on a GPU, and steps without one: whole prompts, continued ones, mixed with decodes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from inference.infer_serving import Row, config_of
from inference.model_rows import MODELS
from torch import Tensor
from training.train_rows import ROWS, configuration

from kernel_matrix.launch_recorder import LaunchRecorder
from llmb.config.model import Model
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.ops.device_capabilities import check_dtypes
from llmb.perfmodel.serving_time.cache_blocks import CacheBlocks
from llmb.runtime.rank_info import RankInfo
from llmb.serve.engine_builder import engine_for_model, graph_sizes, serving_dtypes
from llmb.serve.input_staging import StepBuffer, StepSizes
from llmb.serve.layers.served_model import build_served_model
from llmb.serve.model_runner import TorchModelRunner
from llmb.serve.serve_layout import join_groups
from llmb.serve.step_batch import StepBatch
from llmb.serve.step_graphs import padded_inputs, padded_sizes
from llmb.serve.weights.weight_source import RandomWeights, WeightShard

META = torch.device("meta")
MAX_SEQ_LEN, MAX_BATCH, BUDGET = 8192, 512, 8192
DEEPSEEK = "deepseek-v3 4k"
TRAINED = ("llama 8b 8k", "nemotron-h 8b 8k", DEEPSEEK, "gemma2 9b 8k")  # rows whose models are served too
CACHE_BLOCKS = 256  # of each group of layers
# Decodes, then (start, tokens) of prefill chunks.
EAGER_STEPS: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = (
    (0, ((0, BUDGET),)),
    (0, ((0, 1000), (0, 1000), (0, 40))),
    (3, ((512, 700), (0, 5))),
    (100, ((2048, 3000), (0, 3))),
    (1, ((100, 17),)),
)


@dataclass(frozen=True)
class ServedRow:
    """A model in a dtype, with a KV cache in another."""

    model: Model
    dtype: str
    kv_dtype: str

    @property
    def title(self) -> str:
        return f"serve {self.model.name} {self.dtype}, {self.kv_dtype} cache"

    @property
    def config(self) -> RunConfig:
        row = Row(dtype="bf16", isl=1000, osl=1000, batch=MAX_BATCH, budget=BUDGET, requests=MAX_BATCH)
        config = config_of(self.model, row, META)
        precision: Any = {"dtype": self.dtype, "kv_dtype": self.kv_dtype}
        return replace(config, precision=replace(config.precision, **precision))


def served_rows() -> list[ServedRow]:
    """Return models of both benches, of each kind of layer, in bf16 and in quantized formats."""
    trained = {row.name: configuration(row, "h200", ()).model for row in ROWS if row.name in TRAINED}
    gpt_oss = MODELS["gpt-oss-20b"]
    rows = [(gpt_oss, "mxfp4", kv_dtype) for kv_dtype in ("bf16", "fp8")]
    rows += [(trained[DEEPSEEK], "nvfp4", kv_dtype) for kv_dtype in ("bf16", "fp8")]
    for model in (*trained.values(), MODELS["Qwen3-30B-A3B"]):
        rows += [(model, "bf16", "bf16"), (model, "fp8", "fp8")]
    return [ServedRow(shortened(model), dtype, kv_dtype) for model, dtype, kv_dtype in rows]


def shortened(model: Model) -> Model:
    """Return a model with one layer or two of each kind, at full width."""
    if model.pattern is not None:
        kinds = "".join(dict.fromkeys(model.pattern))
        return replace(model, pattern=kinds, layers=len(kinds))
    experts = model.experts
    if experts is not None and experts.dense_layers:
        experts = replace(experts, dense_layers=1)
    return replace(model, layers=2, experts=experts)


def launch_serving(recorder: LaunchRecorder) -> list[str]:
    """Compute the steps of all models; return why some are refused on this GPU."""
    refused = []
    for row in served_rows():
        recorder.step = row.title
        try:
            check_dtypes(META, dtype=row.dtype, kv_dtype=row.kv_dtype)
        except ConfigError as error:
            refused.append(f"{row.title}: {error}")
            continue
        _launch_model(row)
    return refused


@torch.inference_mode()
def _launch_model(row: ServedRow) -> None:
    config, work = row.config, row.config.workload
    assert isinstance(work, Inference)
    weights = _EmptyWeights(row.model, 0, serving_dtypes(config).dtype, META)
    groups = join_groups(config, RankInfo(0, 1, META))
    model = build_served_model(row.model, weights, serving_dtypes(config), groups, MAX_SEQ_LEN)
    windows = CACHE_BLOCKS if row.model.window_layers else 0
    runner = engine_for_model(model, work, MAX_SEQ_LEN, CacheBlocks(CACHE_BLOCKS, windows)).runner
    assert isinstance(runner, TorchModelRunner)
    for size in graph_sizes(model, work, MAX_BATCH):
        buffer = StepBuffer.on(META, padded_sizes(size, runner.staging))
        runner.compute(buffer, padded_inputs(buffer, size, MAX_SEQ_LEN))
    for decodes, chunks in EAGER_STEPS:
        _launch_eager(runner, decodes, chunks)


def _launch_eager(runner: TorchModelRunner, decodes: int, chunks: tuple[tuple[int, int], ...]) -> None:
    """Compute a step whose chunks the host knows."""
    sizes = StepSizes(
        num_tokens=decodes + sum(count for _, count in chunks),
        num_decodes=decodes,
        num_prefills=len(chunks),
        num_samples=decodes + len(chunks),
        num_blocks=runner.staging.num_blocks,
        num_tables=runner.staging.num_tables,
    )
    buffer = StepBuffer.on(META, sizes)
    inputs = buffer.inputs(StepBatch(), MAX_SEQ_LEN, decodes, max(count for _, count in chunks))
    host = {"prefill_chunks": chunks, "padded_prefills": 0}
    inputs = replace(inputs, **host)  # type: ignore[arg-type]
    if inputs.window_metadata is not None:
        inputs = replace(inputs, window_metadata=replace(inputs.window_metadata, **host))  # type: ignore[arg-type]
    runner.compute(buffer, inputs)


class _EmptyWeights(RandomWeights):
    """Weights without values: the meta device has no random numbers."""

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        return whole if shard is None else shard.slice(whole).contiguous()
