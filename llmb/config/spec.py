"""Frozen dataclasses of a run: Machine, Parallel, Precision, Workload, RunConfig; its Model is in model.py.

Recipe rows, `--set tp=4`, the `params` of a sweep and environment variables (`TP=4`) all use the field names defined
here. Names are unique across the sections of a RunConfig.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from llmb.config.faults.fault_plan import FaultInjection
from llmb.config.model import Model
from llmb.config.offload_plan import Plan, Update

# Trained tensors, and served weights: see config/native/number_formats.py.
Fp8Recipe = Literal["tensorwise_delayed", "tensorwise_current", "rowwise", "tensorwise", "channelwise", "blockwise"]
Status = Literal["ok", "failed", "oom", "timeout", "incomplete", "diverged"]
NSIGHT_VARIABLE = "LLMB_NSIGHT"  # set for ranks that run under Nsight Systems; they start and stop its capture range
STATUSES: tuple[Status, ...] = ("ok", "failed", "oom", "timeout", "incomplete", "diverged")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs that the run occupies."""

    gpu: str  # a key of hardware.GPUS, or the name of a GPU that is not in it
    gpus: int  # total; one rank each
    gpus_per_node: int
    gpu_memory_bytes: int | None = None  # as the driver reports it, of a GPU that is not in hardware.GPUS

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Parallel layout: every degree is a number of ranks, 1 means not split."""

    dp: int = 1  # data: replicas with different sequences
    fsdp: bool = False  # parameters, gradients and optimizer state sharded over dp
    tp: int = 1  # tensor
    pp: int = 1  # pipeline
    cp: int = 1  # context: each sequence split over ranks
    ep: int = 1  # expert
    etp: int = 1  # tensor parallelism inside experts
    vp: int | None = None  # virtual pipeline stages per rank; none without interleaving
    overlap_gather: bool = True  # all-gather sharded weights while the previous layer computes
    overlap_reduce: bool = True  # reduce gradients during the backward pass
    overlap_send: bool = True  # interleaved pipeline: send one stage's output while the next computes

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def dp_cp_size(self) -> int:
        """Ranks that hold the same dense weights and compute different tokens (dp x cp)."""
        return self.dp * self.cp

    @property
    def expert_dp_size(self) -> int:
        """Ranks of a pipeline stage that hold the same experts (expert data parallelism)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of GEMMs and, for inference, of the KV cache."""

    dtype: Literal["fp32", "bf16", "fp8", "nvfp4", "mxfp4"]  # mxfp4: of experts only, the rest in bf16
    kv_dtype: Literal["fp32", "bf16", "fp8"] | None = None  # none: no KV cache
    fp8_recipe: Fp8Recipe | None = None  # how fp8 tensors are scaled; none: no fp8 GEMMs
    attention_dtype: Literal["fp8"] | None = None  # of prefill attention in inference; none: that of activations


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer steps over synthetic tokens or a token file."""

    kind: Literal["training"] = "training"
    seqlen: int  # tokens per sequence
    mbs: int  # micro-batch size: sequences that a rank computes at once
    gbs: int  # global batch size: sequences per optimizer step
    ga: int  # gradient accumulation steps; gbs = mbs * ga * dp
    steps: int = 50
    window: tuple[int, int] = (35, 44)  # first and last measured step, from 1; earlier ones are warm-up
    recompute_layers: int = 0  # per pipeline rank: layers whose activations are recomputed in the backward pass
    offload_layers: int = 0  # per pipeline rank: layers whose activations are offloaded to host memory
    save_norm_outputs: bool = False  # save outputs of norms and activations instead of recomputing them in backward
    cuda_graphs: bool = False
    balanced_experts: bool = False  # force uniform routing, whatever the router scores, as benchmarks do
    # Of AdamW. fp32: in bf16 and fp8 runs a bf16 half, which GEMMs read, and 16 low bits; bf16: stochastic rounding.
    master_weights: Literal["fp32", "bf16"] = "fp32"
    gradients: Literal["fp32", "bf16"] = "fp32"  # accumulated over micro-batches and chunks of the loss
    moments: Literal["fp32", "bf16"] = "fp32"  # of AdamW; bf16: updated with stochastic rounding
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # in which gradients are summed over replicas
    fp8_fast_accum: bool = False  # fast accumulation in backward fp8 GEMMs too; forward ones always use it
    fp8_experts: bool | None = None  # dtype fp8: GEMMs of experts in fp8 too, else in bf16; none: no such experts
    # The defaults of these three are for older files: every new run has those of lr_schedule.py.
    lr: float = 3e-4  # peak learning rate
    lr_warmup_steps: int = 10  # linear warm-up
    lr_decay_steps: int | None = None  # cosine decay to a tenth of the peak at this step; none: constant
    seed: int = 1234
    data: str | None = None  # a token file; none: synthetic tokens
    checkpoint_every: int | None = None  # steps between checkpoints; none: no checkpoints
    resume: str | None = None  # folder of checkpoints to resume from
    force_resume: bool = False  # although data, schedule or number formats are not those of the checkpoint


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Serving benchmark: requests of given lengths, in batches (max_throughput) or one by one (min_latency)."""

    kind: Literal["inference"] = "inference"
    mode: Literal["max_throughput", "min_latency"]
    use_case: str  # reasoning, chat, summarization, generation, or the name of user-defined lengths
    isl: int  # input tokens per request
    osl: int  # output tokens per request
    lengths: Literal["fixed", "normal", "uniform"] = "fixed"  # distribution of both lengths
    isl_spread: float = 0.0  # tokens: standard deviation (normal) or half the range (uniform)
    osl_spread: float = 0.0
    dataset: str | None = None  # read requests from a file in trtllm-bench's line format instead
    # Requests that a scheduler runs at once. With attention_dp each of the tp ranks has its own scheduler, so 768 on
    # 4 ranks are 3072 in total; otherwise all ranks share one. Further requests wait.
    max_batch_size: int
    concurrency: int  # requests sent and not finished, in total
    max_num_tokens: int  # token budget of an engine step
    kv_fraction: float  # KV cache, as a fraction of the memory that weights and the largest step leave
    num_requests: int
    warmup_requests: int | None = None  # none: as many as the concurrency, of the same lengths
    streaming: bool = True
    chunked_prefill: bool = True
    attention_dp: bool = False  # attention data parallelism: attention replicated, each rank with its own requests
    prefix_cache: bool = False  # prompts with a common prefix share blocks; off, as benchmarks repeat prompts
    block_tokens: int = 64  # block size of the paged KV cache
    cuda_graphs: bool = True
    ignore_eos: bool = True  # generate all osl tokens
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    weights: str | None = None  # folder in Hugging Face's layout; none: random weights
    seed: int = 1234
    speculative_tokens: int = 0  # tokens that a draft model proposes and one step verifies; 0: no speculative decoding
    draft: str | None = None  # the draft model: layers:N (the first N), a published model by name, a weights folder
    draft_acceptance: tuple[float, ...] | None = None  # probability of each draft after those before; none: equality
    draft_model: Model | None = None  # set when the run is resolved
    rate: float | None = None  # requests/s at random times, instead of a fixed concurrency
    burstiness: float = 1.0  # with a rate: shape of gamma intervals; 1: Poisson, less: burstier
    slo: str | None = None  # limits for goodput: ttft=500ms,tpot=50ms
    base_url: str | None = None  # engine openai: the server
    served_model: str | None = None  # engine openai: name of the model there; none: that of the recipe
    api_key_env: str | None = None  # engine openai: environment variable that holds the API key


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted time, traffic and memory of one step of a plan. Null: this machine has not been measured."""

    rates: dict[str, Any]  # of the machine: fields of perfmodel.offload.machine_rates.Rates
    step_s: float | None
    compute_s: float | None  # of the step: the device computes
    inbound_s: float | None  # H2D copies are running
    outbound_s: float | None  # D2H copies
    inbound_bytes: int
    outbound_bytes: int
    disk_read_s: float | None = None  # the disk is read
    disk_write_s: float | None = None
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    hardware_flops: float  # executed, recomputation included
    host_slots: dict[str, int]  # host buffers for gradients and activations, by kind
    host_bytes: dict[str, int]  # by kind
    device_bytes: dict[str, int]
    disk_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OutOfCore:
    """Out-of-core training: one GPU, with state and activations in host memory. Null: chosen by the plan."""

    kind: Literal["outofcore"] = "outofcore"
    seqlen: int
    host_gib: float
    device_gib: float
    disk_gib: float = 0.0  # of a disk, for state and weights that host memory does not hold; 0: no disk is used
    disk_path: str | None = None  # folder on that disk; a run needs it, a plan does not
    disk_gbs: float | None = None  # GB/s of that disk each way, for the prediction; none: as `llmb-run probe` measured
    weights: str | None = None  # folder in Hugging Face's layout with the initial weights; none: random weights
    lora_rank: int = 0  # of LoRA adapters, while the weights are frozen; 0: all weights are trained
    lora_alpha: float | None = None  # adapters are scaled by alpha / rank; none: twice the rank
    lora_targets: tuple[str, ...] = ()  # projections with adapters: q_proj, gate_proj, ...; empty: all seven
    frozen_weights: Literal["bf16", "fp8"] | None = None  # of LoRA: dtype of frozen weights; none: that of the run
    update: Update = "stochastic"  # rounding of weight updates
    clip: float | None = None  # gradient clipping: largest global norm; none: no clipping
    gbs: int | None = None  # sequences per optimizer step
    chunk_tokens: int | None = None  # most tokens computed at once
    seqs_per_round: int | None = None  # sequences that pass through all layers together
    resident_params: int | None = None  # weight buckets that stay on the device
    resident_grads: int | None = None
    resident_states: int | None = None
    activation_slots: int | None = None  # (layer, chunk) activations that stay on the device
    full_saves: int | None = None  # of the offloaded ones: everything is saved
    attention_saves: int | None = None  # input, K, V and attention output are saved; of the others input, K and V
    steps: int = 7
    window: tuple[int, int] = (3, 7)
    lr: float = 3e-4  # this and the next fields as in Training
    lr_warmup_steps: int = 10
    lr_decay_steps: int | None = None
    seed: int = 1234
    data: str | None = None
    pack: bool = False  # no attention across documents of a token file
    checkpoint_every: int | None = None
    resume: str | None = None
    force_resume: bool = False
    export: str | None = None  # write the trained weights to this folder in Hugging Face's layout; none: not written
    plan: Plan | None = None  # set when the run is resolved
    prediction: Prediction | None = None


Workload = Training | Inference | OutOfCore


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profiling: what is traced, and in which steps."""

    profile: bool = False
    profiler: Literal["nsight", "torch"] | None = None  # none: Nsight Systems where installed, else torch.profiler
    profile_start: int = 45  # first step profiled
    profile_stop: int = 50  # profiling stops before this step
    profile_ranks: tuple[int, ...] = ()  # empty: all
    gpu_metrics: bool = False
    nccl_trace: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits, restarts, and extra sbatch options."""

    time_limit_s: int = 1800
    stall_limit_s: float | None = None  # without progress, a run counts as hung after this; none: from its step times
    max_restarts: int = 0  # after a failure, from the newest checkpoint
    slurm_params: tuple[str, ...] = ()  # sbatch options: key=value or a bare flag


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Published result of exactly this configuration. Null: the source does not print it."""

    source: str
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None  # serving, all GPUs together
    tflops_per_gpu: float | None = None
    mfu_percent: float | None = None
    days_per_1t_tokens: float | None = None
    plan: dict[str, Any] | None = None  # a published automatic configuration, under its printed names
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Time and memory of a run, predicted before it starts; no engine reads it. Null: `note` says why."""

    metric: Literal["step_time_s", "output_tokens_per_s"]
    value: float | None = None
    interval_80: tuple[float, float] | None = None  # lowest and highest value; none: not known
    ttft_ms: float | None = None  # this and the next: of serving, means over all requests
    tpot_ms: float | None = None
    speculative_speedup: float | None = None  # of a decode step by its drafts, at the stated acceptance
    memory_gib: float | None = None  # of the fullest GPU
    terms: dict[str, float] = field(default_factory=dict)  # seconds of a step by kind of work
    source: str | None = None  # of the rates
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Sustained rates of one GPU as `llmb-run probe` measured them here, beside which the result of a run stands."""

    matmul_tflops: float  # bf16, or fp32 on a CPU
    fp8_tflops: float | None = None  # null: not measured, or the device has none
    memory_gbs: float  # 1e9 bytes/s, read and written
    source: str  # when and where measured


@dataclass(frozen=True, kw_only=True)
class Override:
    """A setting that differs from the recipe row, and where it came from."""

    field: str
    value: Any
    replaced: Any
    source: str  # "environment MAX_BATCH_SIZE", "--set", "file sweep.yaml"


@dataclass(frozen=True, kw_only=True)
class OneRank:
    """The rank of the layout that runs alone, with copies in place of collectives."""

    rank: int  # of all ranks of the layout
    machine: Machine  # where it runs; RunConfig.machine has the layout


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Complete configuration of a run, with its recipe row and all overrides."""

    schema: int = 1
    name: str  # describes the configuration; also the name of the run folder
    target: str  # the workload's key: pretrain_llama3.1
    size: str  # 8b
    engine: str = "native"
    proxy: str | None = None  # how the proxy model differs from the real one; a proxy run has no reference
    one_rank: OneRank | None = None  # none: all ranks run
    fault_injection: FaultInjection | None = None  # none: nothing is broken on purpose
    flops_convention: Literal["causal", "full"] = "causal"
    machine: Machine
    model: Model
    parallel: Parallel
    precision: Precision
    workload: Workload
    profile: Profile = Profile()
    limits: Limits = Limits()
    environment: dict[str, str] = field(default_factory=dict)  # for the ranks; secrets are masked
    recipe_row: dict[str, Any] = field(default_factory=dict)  # as the recipe prints it
    overrides: tuple[Override, ...] = ()
    reference: Reference | None = None
    predicted: Predicted | None = None  # null: a file from before runs were predicted
    ceilings: Ceilings | None = None  # null: `probe` has not measured this machine

    @property
    def launch_machine(self) -> Machine:
        """GPUs on which processes start, one each: those of the layout, or the one of a single rank."""
        return self.machine if self.one_rank is None else self.one_rank.machine

    @property
    def pipeline_rank(self) -> int | None:
        """Position in the pipeline of a rank that runs alone; none: all ranks run."""
        if self.one_rank is None:
            return None
        return self.one_rank.rank * self.parallel.pp // self.parallel.world_size
