"""What this engine runs, and a refusal of everything else: a setting without effect would falsify the benchmark.

`profile.nccl_trace` is not checked here: it acts through the environment that the launcher sets.
"""

from llmb.config.parallel_layout import check_model, check_schedule, check_sequence, most_layers
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.shards import is_fused, is_halved
from llmb.runtime.nsight_window import watched_by_nsight

DTYPES = ("fp32", "bf16", "fp8")
DEGREES = ("dp", "tp", "pp", "cp", "ep", "etp")
RUNS = (
    f"dtype {', '.join(DTYPES)}, every parallel layout ({', '.join(DEGREES)}, fsdp, vp), gradient accumulation (ga), "
    "recompute_layers, offload_layers; on one GPU cuda_graphs, and with dtype bf16 or fp8 "
    "masters=bf16, gradients=bf16 and moments=bf16, of a Llama also keep_inputs; with dtype fp8 fast_sums"
)


def supported_workload(config: RunConfig) -> Training:
    """The training workload of a configuration that this engine runs in every detail, or a ConfigError."""
    work, parallel = config.workload, config.parallel
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.train is the native engine")
    if not isinstance(work, Training):
        raise ConfigError(f"a workload of kind {work.kind}: python -m llmb.train runs kind training")
    degrees = {degree: getattr(parallel, degree) for degree in DEGREES}
    settings = {
        f"dtype={config.precision.dtype}": config.precision.dtype not in DTYPES,
        f"kv_dtype={config.precision.kv_dtype}": config.precision.kv_dtype is not None,
        **{
            f"cuda_graphs=true with {degree}={ranks}": work.cuda_graphs and ranks > 1
            for degree, ranks in degrees.items()
        },
        **{
            f"{name}=bf16 with dtype={config.precision.dtype} on {parallel.world_size} ranks": not is_halved(config)
            and getattr(work, name) == "bf16"
            for name in ("masters", "gradients", "moments")
        },
        f"keep_inputs=true with {_unfused(config)}": work.keep_inputs and not is_fused(config),
        f"keep_inputs=true with offload_layers={work.offload_layers}": work.keep_inputs and work.offload_layers > 0,
        f"fast_sums=true with dtype={config.precision.dtype}": work.fast_sums and config.precision.dtype != "fp8",
        f"cuda_graphs=true with offload_layers={work.offload_layers}": work.cuda_graphs and work.offload_layers > 0,
        f"cuda_graphs=true with experts in {config.precision.dtype}": work.cuda_graphs
        and config.model.experts is not None
        and config.precision.dtype == "fp32",  # it reads the experts' loads on the host
        "gpu_metrics=true (needs Nsight Systems)": config.profile.gpu_metrics and not watched_by_nsight(),
    }
    refused = [setting for setting, asked in settings.items() if asked]
    if refused:
        raise ConfigError(f"the native training engine does not run {', '.join(refused)}; it runs {RUNS}")
    if work.cuda_graphs and config.machine.gpu == "cpu":
        raise ConfigError("cuda_graphs=true needs a CUDA GPU; machine.gpu=cpu has none")
    _check_sizes(work, parallel.dp)
    check_model(parallel, config.model)
    check_sequence(work.seqlen, parallel)
    check_schedule(work.ga, parallel)
    whose = "the model" if parallel.pp == 1 else "a rank of the pipeline"
    _check_activations(work, whose, most_layers(config.model.layers, parallel))
    _check_schedule(work)
    return work


def _unfused(config: RunConfig) -> str:
    """Why layers are not computed by hand."""
    dtype, machine = config.precision.dtype, config.machine.gpu
    return f"{config.model.architecture} in {dtype} on {config.parallel.world_size} ranks of {machine}"


def _check_sizes(work: Training, dp: int) -> None:
    for name in ("seqlen", "mbs", "ga", "steps"):
        if getattr(work, name) < 1:
            raise ConfigError(f"workload.{name}={getattr(work, name)}: must be at least 1")
    if work.gbs != work.mbs * work.ga * dp:
        product = work.mbs * work.ga * dp
        raise ConfigError(f"gbs={work.gbs} is not mbs * ga * dp = {work.mbs} * {work.ga} * {dp} = {product}")
    if work.checkpoint_every is not None and work.checkpoint_every < 1:
        raise ConfigError(f"checkpoint_every={work.checkpoint_every}: must be at least 1")


def _check_activations(work: Training, whose: str, layers: int) -> None:
    if not 0 <= work.recompute_layers <= layers:
        raise ConfigError(f"recompute_layers={work.recompute_layers}: {whose} has {layers} layers, so 0 to {layers}")
    left = layers - work.recompute_layers
    if not 0 <= work.offload_layers <= left:
        raise ConfigError(
            f"offload_layers={work.offload_layers}: {left} of the {layers} layers are not recomputed, so 0 to {left}"
        )


def _check_schedule(work: Training) -> None:
    if work.lr_warmup_steps < 0:
        raise ConfigError(f"lr_warmup_steps={work.lr_warmup_steps}: must be at least 0")
    if work.lr_decay_steps is not None and work.lr_decay_steps <= work.lr_warmup_steps:
        raise ConfigError(
            f"lr_decay_steps={work.lr_decay_steps}: must be more than lr_warmup_steps={work.lr_warmup_steps}, "
            "where the learning rate begins to fall"
        )
