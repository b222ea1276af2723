"""Description of a served model under load: shape, layout, precision, lengths, concurrency, GPUs and engine.

ServingSetup(shape=find_model("llama3.1-70b"), gpu="h200", dtype="fp8", isl=1024, osl=1024, concurrency=64, tp=2)
"""

from dataclasses import dataclass, replace

from llmb.config.native.number_formats import published_fp8_recipe
from llmb.config.native.predicted_blocks import check_native_blocks
from llmb.config.native.request_lengths import Lengths
from llmb.config.native.speculation import MOST_DRAFTS
from llmb.config.parallel_layout import check_tensor_split, divisors
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.serving_time.serving_constants import ENGINES, engine_generation
from llmb.perfmodel.shapes.model_catalog import ModelShape
from llmb.perfmodel.step_time.cluster_fabric import FABRICS

DTYPES = ("bf16", "fp8", "nvfp4")  # of the weights; nvfp4 also stands for mxfp4
KV_DTYPES = ("bf16", "fp8")
COUNTS = ("isl", "osl", "concurrency", "tp", "pp", "ep", "attention_dp", "moe_tp", "max_num_tokens", "max_batch_size")
FRACTIONS = ("memory_fraction", "length_ratio", "acceptance")
WAVES = 10  # requests per client of a benchmark


@dataclass(frozen=True, kw_only=True)
class ServingSetup:
    """Everything that the predictor needs to know of an engine and its load.

    `concurrency` clients send a request each and the next one when it is finished.
    """

    shape: ModelShape
    gpu: str
    dtype: str  # of the weights
    isl: int  # input tokens of a request
    osl: int  # output tokens
    concurrency: int
    kv_dtype: str = "bf16"
    tp: int = 1  # tensor parallelism of attention and dense layers, inside one attention replica
    pp: int = 1
    attention_dp: int = 1  # replicas of attention, each with its own requests
    ep: int = 1  # experts over ranks
    moe_tp: int = 1  # the width of every expert over ranks; ep x moe_tp = tp x attention_dp
    engine: str = "vllm"
    engine_version: str = ""  # none: the newest generation
    max_num_tokens: int = 8192  # token budget of a step: longer prompts are prefilled in chunks
    max_batch_size: int = 4096
    memory_fraction: float = 0.9  # of the GPU's memory, for weights and KV cache
    length_ratio: float = 1.0  # mean length over nominal length: 0.9 where lengths vary uniformly in 0.8 to 1
    draft_tokens: int = 0  # of speculative decoding, per step and request
    acceptance: float = 0.8  # probability that a draft token is accepted after the one before it
    draft_shape: ModelShape | None = None  # of a draft model; none: a multi-token-prediction layer proposes
    draft_acceptance: tuple[float, ...] = ()  # of a draft model, by position, in place of `acceptance`
    receive_interval: int = 1  # steps between two looks at new requests (SGLang's scheduler-recv-interval)
    lengths: Lengths = ()  # engine native: input and output tokens of each request; none: all have isl and osl
    waves: int = WAVES  # requests per client: the first ones arrive together
    attention_dtype: str | None = None  # engine native: fp8, of prefill attention; none: bf16
    fp8_recipe: str | None = None  # engine native: how fp8 weights are scaled; none: as the model is published
    gpu_memory_bytes: float | None = None  # as the driver reports it, of a GPU without fitted efficiencies
    rates: Rates | None = None  # measured by `probe`: of engine native, or of a GPU without fitted efficiencies

    def __post_init__(self) -> None:
        for name in (*COUNTS, "receive_interval", "waves"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number, 1 or more, got {value!r}")
        for title, value, choices in (
            ("GPU type", self.gpu, FABRICS if self.gpu_memory_bytes is None and self.rates is None else [self.gpu]),
            ("dtype", self.dtype, DTYPES), ("kv_dtype", self.kv_dtype, KV_DTYPES),
            ("engine", self.engine, ENGINES),
        ):  # fmt: skip
            if value not in choices:
                raise UnknownName(title, value, choices)
        if not isinstance(self.draft_tokens, int) or not 0 <= self.draft_tokens <= MOST_DRAFTS:
            raise ConfigError(f"draft_tokens must be a whole number, 0 to {MOST_DRAFTS}, got {self.draft_tokens!r}")
        _check_attention_dtype(self)
        if self.engine == "native":
            check_native_blocks(self.shape.model)
        for name in FRACTIONS:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {getattr(self, name)!r}")
        _check_layout(self)

    @property
    def has_block_scales(self) -> bool:
        """Whether fp8 weights of the native engine have a scale for each block: as published, unless stated."""
        recipe = self.fp8_recipe or published_fp8_recipe(self.shape.model)
        return self.dtype == "fp8" and recipe == "blockwise"

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.attention_dp

    @property
    def emitted(self) -> float:
        """Mean output tokens of a request in a decode step."""
        return expected_tokens(self.draft_acceptance or (self.acceptance,) * self.draft_tokens)

    @property
    def without_drafts(self) -> "ServingSetup":
        """The same without speculative decoding."""
        return replace(self, draft_tokens=0, draft_shape=None, draft_acceptance=())

    @property
    def draft_alone(self) -> "ServingSetup | None":
        """The draft model under the same load; none without one."""
        return None if self.draft_shape is None else replace(self.without_drafts, shape=self.draft_shape)

    @property
    def generation(self) -> str:
        """Engine with the year of its release, as constants are fitted by."""
        return engine_generation(self.engine, self.engine_version)


def expected_tokens(acceptance: tuple[float, ...]) -> float:
    """Return the mean tokens of a step: its own, and every draft that is accepted with all before it."""
    tokens = reached = 1.0
    for probability in acceptance:
        reached *= probability
        tokens += reached
    return tokens


def _check_attention_dtype(setup: ServingSetup) -> None:
    if setup.attention_dtype is None:
        return
    if setup.attention_dtype != "fp8":
        raise UnknownName("attention_dtype", setup.attention_dtype, ("fp8",))
    if setup.engine != "native" or setup.kv_dtype != "fp8":
        raise ConfigError("attention_dtype=fp8 is prefill attention of the native engine beside kv_dtype=fp8")


def _check_layout(setup: ServingSetup) -> None:
    model = setup.shape.model
    check_tensor_split(model, setup.tp)
    if setup.pp > model.layers:
        raise ConfigError(f"pp {setup.pp} for {model.layers} layers; at most {model.layers}")
    if model.experts is None:
        if setup.ep > 1:
            raise ConfigError(f"{model.name} has no experts: ep {setup.ep} is not possible, use tp or pp")
        return
    ranks = setup.tp * setup.attention_dp
    if setup.ep * setup.moe_tp != ranks:
        raise ConfigError(
            f"ep x moe_tp = {setup.ep} x {setup.moe_tp} must be tp x attention_dp = {setup.tp} x {setup.attention_dp} "
            f"= {ranks}: for example ep={ranks} moe_tp=1, or ep=1 moe_tp={ranks}"
        )
    if model.experts.count % setup.ep:
        possible = [ep for ep in divisors(model.experts.count) if ranks % ep == 0]
        raise ConfigError(f"ep {setup.ep} does not divide {model.experts.count} experts; possible: {possible}")
