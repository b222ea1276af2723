"""Description of one training step: model, layout, precision, batch, GPUs and engine.

StepSetup(shape=find_model("llama3.1-8b"), gpu="h100", gpus=8, dtype="fp8", seqlen=8192, mbs=1, gbs=128)
"""

from dataclasses import dataclass, field
from typing import Literal

from llmb.config.model import Model
from llmb.config.native.predicted_blocks import check_native_blocks
from llmb.config.parallel_layout import check_tensor_split, divisors
from llmb.config.spec import OutOfCore, Parallel, RunConfig, Training
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.hardware import GIB, gpu
from llmb.perfmodel.offload.machine_rates import Rates as MachineRates
from llmb.perfmodel.shapes.model_catalog import ModelShape, run_shape
from llmb.perfmodel.step_time.native_formats import NativeFormats, native_formats

# fp8: one scale per tensor; fp8-row: per row; fp8-block: per 128 values or 128 x 128 weights; fp8-mx: per 32 values
DTYPES = ("bf16", "fp8", "fp8-row", "fp8-block", "fp8-mx", "nvfp4")
DTYPE_ALIASES = {
    "fp8-cs": "fp8", "fp8-ds": "fp8", "fp8-tensorwise": "fp8", "fp8-rowwise": "fp8-row", "fp8-sc": "fp8-block",
    "fp8-blockwise": "fp8-block", "mxfp8": "fp8-mx", "fp8-mx-rceil": "fp8-mx",
}  # fmt: skip
RECIPE_DTYPES = {"rowwise": "fp8-row", "blockwise": "fp8-block"}  # fp8_recipe of a run of ours -> data type here
Recompute = Literal["none", "selective", "full"]
DEFAULT_ENGINE = "megatron-bridge"
ENGINE_OF = {"native": "native", "megatron_bridge": "megatron-bridge"}  # engine of a run -> key of ENGINES
TASKS = ("pretrain", "sft", "lora")
ENDS = 2  # stages beyond the layers and MTP's: Megatron may count embedding and loss, as for 126 layers over 16 x 8


@dataclass(frozen=True)
class LocalCollectives:
    """Collectives of a micro-batch that are copies inside the GPU, because one rank of a layout runs alone."""

    count: float = 0.0
    bytes: float = 0.0  # read and written


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """Everything that the predictor needs to know of a training run."""

    shape: ModelShape
    gpu: str
    gpus: int
    dtype: str
    seqlen: int  # tokens per sequence
    mbs: int  # sequences per micro-batch
    gbs: int  # sequences per step
    parallel: Parallel = field(default_factory=Parallel)  # its dp is not used: gpus give it
    fsdp_ranks: int | None = None  # among which fsdp shards, each group of them with all weights; none: all replicas
    layers: int | None = None  # of a model with fewer layers than the published one
    recompute: Recompute = "none"
    recompute_layers: int | None = None  # of a pipeline rank, at least, with recompute full; none: all
    recompute_modules: tuple[str, ...] = ()  # of every layer, by Megatron's names: step_work.py
    offload_layers: int = 0  # of a pipeline rank: activations in host memory
    graphs: float = 0.0  # fraction of the launches that CUDA graphs replace; 1: the whole step, experts too
    graph_parts: tuple[str, ...] = ()  # instead, parts of layers captured: attn, mamba, moe_router, moe_preprocess
    engine: str = DEFAULT_ENGINE  # a key of step_constants.ENGINES
    dispatcher: str = "alltoall"  # of experts: alltoall, deepep, hybridep, tokendrop
    overlap_tp: bool = True  # TP collectives overlapped with GEMMs
    overlap_experts: bool = False  # all-to-all of experts overlapped with another micro-batch
    fused_experts: bool = False  # grouped GEMMs that activate and quantize in their epilogue
    fp8_attention: bool = False  # products of attention in fp8
    task: str = "pretrain"
    document_tokens: int | None = None  # of packed sequences, within which tokens attend; none: one document
    watts: float | None = None  # power limit of the GPU; none: its nominal one
    local: LocalCollectives | None = None  # of one rank that runs alone; none: of ranks that communicate
    formats: NativeFormats = field(default_factory=NativeFormats)  # engine native: of the training state
    rates: MachineRates | None = None  # measured by `probe`: of engine native, or of a GPU without fitted efficiencies

    def __post_init__(self) -> None:
        for name in ("gpus", "seqlen", "mbs", "gbs"):
            _check_count(name, getattr(self, name))
        for name in ("tp", "pp", "cp", "ep", "etp"):
            _check_count(name, getattr(self.parallel, name))
        if self.dtype not in DTYPES:
            raise UnknownName("dtype", self.dtype, DTYPES)
        peaks = gpu(self.gpu).peak_flops
        if peaks and self.peak_dtype not in peaks:
            dtypes = [dtype for dtype in DTYPES if dtype.partition("-")[0] in peaks]
            raise ConfigError(f"{self.gpu} has no {self.peak_dtype} GEMMs; data types are: {', '.join(dtypes)}")
        if self.task not in TASKS:
            raise UnknownName("task", self.task, TASKS)
        check_shards(self.shape.model, self.parallel)
        check_ranks(self.gpus, self.parallel)
        if self.seqlen % self.parallel.cp:
            raise ConfigError(f"cp {self.parallel.cp} does not divide sequences of {self.seqlen} tokens")
        if self.gbs % (self.dp * self.mbs):
            raise ConfigError(
                f"gbs {self.gbs} is not a multiple of dp x mbs = {self.dp} x {self.mbs} = {self.dp * self.mbs}"
            )
        if self.shape.model.mla and self.shape.model.mla.index_topk:
            raise ConfigError(
                f"{self.shape.model.name} has sparse attention, which is predicted with --task serve only"
            )
        if self.engine == ENGINE_OF["native"]:
            check_native_blocks(self.shape.model)
        stage_ranks, experts = self.gpus // self.parallel.pp, self.parallel.ep * self.parallel.etp
        if stage_ranks % experts:
            possible = [ep for ep in divisors(stage_ranks) if stage_ranks % (ep * self.parallel.etp) == 0]
            raise ConfigError(
                f"ep x etp = {experts} does not divide the {stage_ranks} GPUs of a pipeline stage; ep could be "
                f"{', '.join(map(str, possible)) or 1}"
            )
        stages = self.parallel.pp * (self.parallel.vp or 1)
        ends = self.shape.mtp_layers + ENDS if self.engine.startswith("megatron") else 0
        if self.layer_count + ends < stages:
            raise ConfigError(
                f"pp x vp = {stages} stages for {self.layer_count} layers; use at most {self.layer_count}"
            )

    @property
    def peak_dtype(self) -> str:
        """Data type whose peak the GEMMs are measured against."""
        return self.dtype.partition("-")[0]

    @property
    def gpu_memory_bytes(self) -> float | None:
        """Memory of one GPU; None: neither listed nor measured."""
        return gpu(self.gpu).memory_bytes or (self.rates.device_memory_bytes if self.rates else None)

    def fits(self, memory_gib: float) -> bool:
        """Return whether one GPU has this memory; of unknown memory any fits."""
        return self.gpu_memory_bytes is None or memory_gib * GIB <= self.gpu_memory_bytes

    @property
    def dp(self) -> int:
        return self.gpus // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    @property
    def sharding_ranks(self) -> int:
        """Ranks among which the weights of a pipeline and tensor rank are sharded, or the optimizer state."""
        return self.fsdp_ranks or self.dp * self.parallel.cp

    @property
    def ga(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.gbs // (self.dp * self.mbs)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before sequence parallelism."""
        return self.mbs * self.seqlen // self.parallel.cp

    @property
    def layer_count(self) -> int:
        return self.layers or self.shape.model.layers

    @property
    def most_layers(self) -> int:
        """Layers of the fullest pipeline rank, multi-token prediction's included."""
        return -(-(self.layer_count + self.shape.mtp_layers) // self.parallel.pp)

    @property
    def recomputed_layers(self) -> int:
        """Layers of the fullest pipeline rank whose forward is repeated.

        Megatron's recompute_num_layers counts in each virtual stage, so with vp they come in multiples of it.
        """
        if self.recompute != "full" or self.recompute_layers is None:
            return self.most_layers if self.recompute == "full" else 0
        stages = (self.parallel.vp or 1) if self.engine.startswith("megatron") else 1
        return min(self.most_layers, -(-self.recompute_layers // stages) * stages)


def parse_dtype(text: str) -> str:
    """Return a data type by its name or an alias; unknown names list the known ones."""
    dtype = DTYPE_ALIASES.get(text, text)
    if dtype not in DTYPES:
        raise UnknownName("dtype", text, DTYPES)
    return dtype


def setup_of(config: RunConfig, engine: str | None = None, rates: MachineRates | None = None) -> StepSetup:
    """Return the description of a resolved training run, by its own engine unless another is named."""
    work = config.workload
    if not isinstance(work, Training):
        hint = "its plan has its time: llmb-run plan or show" if isinstance(work, OutOfCore) else "add --task serve"
        raise ConfigError(f"{config.name} is not predicted as a training step; {hint}")
    if config.precision.dtype == "fp32":
        raise UnknownName("dtype", "fp32", DTYPES)
    return StepSetup(
        shape=run_shape(config.model),
        gpu=config.machine.gpu,
        gpus=config.machine.gpus,
        dtype=RECIPE_DTYPES.get(config.precision.fp8_recipe or "", config.precision.dtype),
        seqlen=work.seqlen,
        mbs=work.mbs,
        gbs=work.gbs,
        parallel=config.parallel,
        recompute="full" if work.recompute_layers else "none",
        recompute_layers=work.recompute_layers or None,
        offload_layers=work.offload_layers,
        graphs=float(work.cuda_graphs),
        engine=engine or ENGINE_OF.get(config.engine, DEFAULT_ENGINE),
        formats=native_formats(config),
        rates=rates,
    )


def check_ranks(gpus: int, split: Parallel) -> None:
    """Refuse GPUs that are not whole groups of tp x pp x cp."""
    ranks = split.tp * split.pp * split.cp
    if gpus % ranks:
        raise ConfigError(f"tp x pp x cp = {ranks} does not divide {gpus} GPUs; use a multiple of {ranks}")


def check_shards(model: Model, split: Parallel) -> None:
    """Refuse tp that splits a head, and ep that splits an expert or has none to distribute."""
    check_tensor_split(model, split.tp)
    if model.experts is None and split.ep > 1:
        raise ConfigError(f"{model.name} has no experts: ep {split.ep} is not possible, use tp, pp or fsdp")
    if model.experts and model.experts.count % split.ep:
        possible = [ep for ep in divisors(model.experts.count) if ep > 1]
        raise ConfigError(f"ep {split.ep} does not divide {model.experts.count} experts; possible: {possible}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number, 1 or more, got {value!r}")
