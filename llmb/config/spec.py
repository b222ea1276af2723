"""The nouns every part of llmb shares, frozen: Machine Model Parallel Precision Workload RunConfig.

Field names are the one vocabulary of the whole tool: a recipe row, `--set tp=4`, a sweep's `params` and an environment
variable (`TP=4`) all name a field as it is named here. Names are unique across the sections of a RunConfig.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from llmb.config.offload_plan import Plan, Update

Architecture = Literal["llama", "nemotron_h", "grok1", "deepseek"]
Status = Literal["ok", "failed", "oom", "timeout", "incomplete", "diverged"]
NSIGHT_VARIABLE = "LLMB_NSIGHT"  # set where Nsight Systems watches a rank, which then opens and closes its window
STATUSES: tuple[Status, ...] = ("ok", "failed", "oom", "timeout", "incomplete", "diverged")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the run occupies."""

    gpu: str  # a key of hardware.GPUS
    gpus: int  # in all; one rank each
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding and how it is stretched."""

    theta: float = 500_000.0
    scaling: Literal["none", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_tokens: int = 8192
    low_freq_factor: float = 1.0  # llama3: turns within the original context below which a pair is slowed in full
    high_freq_factor: float = 4.0  # llama3: turns above which it is not slowed
    beta_fast: float = 32.0  # yarn: the same two bounds
    beta_slow: float = 1.0
    mscale_all_dim: float = 0.0  # yarn: how much the attention's scale grows with the factor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of gated MLPs in place of the dense one."""

    count: int
    top_k: int
    ffn: int  # width of one expert
    shared: int = 0  # experts every token visits
    dense_layers: int = 0  # leading layers that keep the dense MLP
    groups: int = 1  # experts are chosen from `top_groups` of these
    top_groups: int = 1
    score: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid comes with a correction bias per expert
    renormalise: bool = True  # the chosen experts' weights are made to sum to 1
    scale: float = 1.0  # of the routed experts' sum
    aux_loss: float = 0.0  # weight of the load-balancing loss; 0: the model has none


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention: low-rank queries, keys and values."""

    q_rank: int
    kv_rank: int
    nope_dim: int  # per head, without position
    rope_dim: int  # per head, with position; shared among heads for keys
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """A Mamba-2 mixer; its inner width is heads * head_dim."""

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int
    conv: int = 4


@dataclass(frozen=True, kw_only=True)
class Model:
    """An architecture in numbers."""

    name: str
    architecture: Architecture
    layers: int
    hidden: int
    ffn: int  # width of the dense MLP
    gated: bool = True  # three matrices (gate, up, down) instead of two
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    activation: Literal["silu", "gelu", "squared_relu"] = "silu"  # of the MLPs and experts
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    post_norms: bool = False  # a second norm on what each block adds to the stream
    rope: Rope | None = Rope()  # none: attention without positions
    attention_cap: float | None = None  # attention logits are squeezed to +-cap by tanh
    embedding_scale: float = 1.0  # of the embedding's output
    logit_scale: float = 1.0  # of the logits
    pattern: str | None = None  # hybrids, one letter a layer: M mamba, * attention, - MLP
    experts: Experts | None = None
    latent: Latent | None = None
    mamba: Mamba | None = None

    @property
    def blocks(self) -> dict[str, int]:
        """How many of each kind of block the stack holds."""
        if self.pattern is not None:
            counts = {"mamba": self.pattern.count("M"), "mlp": self.pattern.count("-")}
            return counts | {"attention": self.pattern.count("*")}
        dense = self.experts.dense_layers if self.experts else self.layers
        attention = "latent_attention" if self.latent else "attention"
        return {attention: self.layers, "mlp": dense, "experts": self.layers - dense}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the work is spread over ranks; every degree counts ranks, 1 means not split."""

    dp: int = 1  # data: replicas that see different sequences
    fsdp: bool = False  # parameters, gradients and optimizer state sharded over dp
    tp: int = 1  # tensor
    pp: int = 1  # pipeline
    cp: int = 1  # context: one sequence over several ranks
    ep: int = 1  # experts
    etp: int = 1  # tensor, inside experts
    vp: int | None = None  # virtual pipeline stages a rank; none without interleaving
    overlap_gather: bool = True  # sharded weights are gathered while the layer before computes
    overlap_reduce: bool = True  # gradients are reduced while the backward pass goes on
    overlap_send: bool = True  # with several stages a rank: what one gives is sent while the next computes

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sharers(self) -> int:
        """Ranks that see different tokens through the same dense weights."""
        return self.dp * self.cp

    @property
    def expert_sharers(self) -> int:
        """Ranks of a pipeline stage that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number format of matrix products, and of the KV cache where there is one."""

    dtype: Literal["fp32", "bf16", "fp8", "nvfp4"]
    kv_dtype: Literal["bf16", "fp8"] | None = None
    fp8_scaling: Literal["tensor", "channel", "block"] | None = None  # of served weights; none: as published


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer steps over synthetic tokens or a token file."""

    kind: Literal["training"] = "training"
    seqlen: int  # tokens a sequence
    mbs: int  # sequences a rank computes at once
    gbs: int  # sequences an optimizer step sees in all
    ga: int  # micro-batches a rank accumulates; gbs = mbs * ga * dp
    steps: int = 50
    window: tuple[int, int] = (35, 44)  # steps that count, first and last, from 1; those before are warm-up
    recompute_layers: int = 0  # of each pipeline stage, whose activations are computed again in the backward pass
    offload_layers: int = 0  # of each pipeline stage, whose activations wait in host memory
    keep_inputs: bool = False  # of a layer's products all that norms and activations made, else made again going back
    cuda_graphs: bool = False
    balanced_experts: bool = False  # tokens are dealt to experts evenly, whatever the router says, as benchmarks do
    masters: Literal["fp32", "bf16"] = "fp32"  # weights as AdamW knows them; in bf16 rounded at random, as moments are
    gradients: Literal["fp32", "bf16"] = "fp32"  # in which micro-batches add up, and chunks of the loss
    moments: Literal["fp32", "bf16"] = "fp32"  # of AdamW; in bf16 rounded at random, so that on average nothing is lost
    fast_sums: bool = False  # 8-bit products of the way back add with fewer bits, as those of the way forward always do
    lr: float = 3e-4  # highest learning rate
    lr_warmup_steps: int = 10  # it rises linearly over these
    lr_decay_steps: int | None = None  # and falls as a cosine to a tenth by this step; none: stays
    seed: int = 1234
    data: str | None = None  # a token file; none: synthetic tokens
    checkpoint_every: int | None = None  # steps between checkpoints; none: none are written
    resume: str | None = None  # a folder of checkpoints to go on from


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Requests of given lengths, as many as fit at once or one by one."""

    kind: Literal["inference"] = "inference"
    mode: Literal["max_throughput", "min_latency"]
    use_case: str  # reasoning, chat, summarization, generation, or a name the user gave to his own lengths
    isl: int  # input tokens a request
    osl: int  # output tokens a request
    lengths: Literal["fixed", "normal", "uniform"] = "fixed"  # how both vary around these
    isl_spread: float = 0.0  # tokens: standard deviation (normal) or half the range (uniform)
    osl_spread: float = 0.0
    dataset: str | None = None  # requests from a file in trtllm-bench's line format instead
    # A scheduler computes at most max_batch_size requests at once. With attention_dp each of the tp ranks has its own
    # scheduler, so that 768 on 4 ranks are 3072 in all; otherwise all ranks share one. Requests beyond that wait.
    max_batch_size: int
    concurrency: int  # requests in flight, in all
    max_num_tokens: int  # tokens one engine step may process
    kv_fraction: float  # of the memory left beside the weights and the largest step
    num_requests: int
    warmup_requests: int | None = None  # none: as many as are in flight at once, of the same lengths
    streaming: bool = True
    chunked_prefill: bool = True
    attention_dp: bool = False  # attention replicated, each rank with its own requests
    prefix_cache: bool = False  # prompts that begin alike share blocks; off, as benchmarks repeat prompts
    block_tokens: int = 64  # of the paged cache
    cuda_graphs: bool = True  # where there is a GPU
    ignore_eos: bool = True  # every answer has the length asked for
    temperature: float = 0.0  # 0: always the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    weights: str | None = None  # a folder in Hugging Face's layout; none: random weights
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan is expected to take, a step. Null: nobody has measured this machine."""

    rates: dict[str, Any]  # of the machine, as predict/rates.py names them
    step_s: float | None
    compute_s: float | None  # of these, in which the device computes
    inbound_s: float | None  # in which the link carries something from the host to the device
    outbound_s: float | None
    inbound_bytes: int
    outbound_bytes: int
    hardware_flops: float  # executed, with what is computed again
    home_slots: dict[str, int]  # places that gradients and activations take on the host, by kind
    host_bytes: dict[str, int]  # by kind
    device_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class OutOfCore:
    """Training on one GPU with state and activations in host memory. Null where the plan is to choose."""

    kind: Literal["outofcore"] = "outofcore"
    seqlen: int
    host_gib: float
    device_gib: float
    update: Update = "stochastic"  # how weights take small changes
    clip: float | None = None  # largest norm of a step's gradients; none: they are taken as they are
    gbs: int | None = None  # sequences an optimizer step
    chunk_tokens: int | None = None  # most that are computed at once
    seqs_per_round: int | None = None  # that go through all layers together
    resident_params: int | None = None  # units of weights that stay on the device
    resident_grads: int | None = None
    resident_states: int | None = None
    activation_slots: int | None = None  # whole (layer, chunk)s that stay on the device
    full_saves: int | None = None  # of those that wait on the host: everything is kept
    attention_saves: int | None = None  # input, keys and values, attention; of the others without the attention
    steps: int = 7
    window: tuple[int, int] = (3, 7)
    lr: float = 3e-4  # as in Training, as are all below
    lr_warmup_steps: int = 10
    lr_decay_steps: int | None = None
    seed: int = 1234
    data: str | None = None
    pack: bool = False  # documents of a token file do not see one another
    checkpoint_every: int | None = None
    resume: str | None = None
    export: str | None = None  # a folder for the trained weights in Hugging Face's layout; none: they are not kept
    plan: Plan | None = None  # made when the run is resolved
    prediction: Prediction | None = None


Workload = Training | Inference | OutOfCore


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What is traced, and when."""

    profile: bool = False
    profiler: Literal["nsight", "torch"] | None = None  # none: Nsight Systems where it is, else torch's own
    profile_start: int = 45  # first step profiled
    profile_stop: int = 50  # profiling stops before this step
    profile_ranks: tuple[int, ...] = ()  # none named: all
    gpu_metrics: bool = False
    nccl_trace: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the run may take, and extra wishes for the scheduler."""

    time_limit_s: int = 1800
    stall_limit_s: float | None = None  # without progress before a run counts as hung; none: by its own step times
    slurm_params: tuple[str, ...] = ()  # key=value or a bare flag, as sbatch names them


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A published result of this very configuration. Null: the source does not print it."""

    source: str
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None  # of serving, by all GPUs together
    tflops_per_gpu: float | None = None
    mfu_percent: float | None = None
    days_per_1t_tokens: float | None = None
    plan: dict[str, Any] | None = None  # a published automatic configuration, by its printed names
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Override:
    """One departure from the recipe row, and who asked for it."""

    field: str
    value: Any
    replaced: Any
    source: str  # "environment MAX_BATCH_SIZE", "--set", "file sweep.yaml"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything an engine needs, complete, with the recipe row it came from and every override made to it."""

    schema: int = 1
    name: str  # spells the configuration; also the folder's name
    target: str  # the workload's key: pretrain_llama3.1
    size: str  # 8b
    engine: str = "native"
    proxy: str | None = None  # how the model was altered so that it fits; such a run has no reference
    flops_convention: Literal["causal", "full"] = "causal"
    machine: Machine
    model: Model
    parallel: Parallel
    precision: Precision
    workload: Workload
    profile: Profile = Profile()
    limits: Limits = Limits()
    environment: dict[str, str] = field(default_factory=dict)  # for the ranks; secrets are masked here
    recipe_row: dict[str, Any] = field(default_factory=dict)  # as the recipe prints it
    overrides: tuple[Override, ...] = ()
    reference: Reference | None = None
