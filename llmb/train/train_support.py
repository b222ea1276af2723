"""Check that the training engine supports a configuration: a setting without effect would falsify the benchmark.

`profile.nccl_trace` is not checked here: it acts through the environment that the launcher sets.
"""

from llmb.config.parallel_layout import check_model, check_schedule, check_sequence, max_layers_per_rank
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.shards import has_split_weights, is_fused
from llmb.runtime.profile_window import is_under_nsight

DTYPES = ("fp32", "bf16", "fp8")
DEGREES = ("dp", "tp", "pp", "cp", "ep", "etp")
SUPPORTED = (
    f"dtype {', '.join(DTYPES)}, every parallel layout ({', '.join(DEGREES)}, fsdp, vp), gradient accumulation (ga), "
    "recompute_layers, offload_layers; on one GPU cuda_graphs, and with dtype bf16 or fp8 "
    "master_weights=bf16, gradients=bf16 and moments=bf16, for Llama also save_norm_outputs; with dtype fp8 "
    "fp8_fast_accum"
)


def supported_workload(config: RunConfig) -> Training:
    """Return the training workload of a configuration, or raise ConfigError if a setting is not supported."""
    workload, parallel = config.workload, config.parallel
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.train is the native engine")
    if not isinstance(workload, Training):
        raise ConfigError(f"a workload of kind {workload.kind}: python -m llmb.train runs kind training")
    degrees = {degree: getattr(parallel, degree) for degree in DEGREES}
    dtype = config.precision.dtype
    unsupported = {
        f"dtype={dtype}": dtype not in DTYPES,
        f"kv_dtype={config.precision.kv_dtype}": config.precision.kv_dtype is not None,
        **{
            f"cuda_graphs=true with {degree}={ranks}": workload.cuda_graphs and ranks > 1
            for degree, ranks in degrees.items()
        },
        **{
            f"{name}=bf16 with dtype={dtype} on {parallel.world_size} ranks": getattr(workload, name) == "bf16"
            and not has_split_weights(config)
            for name in ("master_weights", "gradients", "moments")
        },
        f"save_norm_outputs=true with {_unfused_reason(config)}": workload.save_norm_outputs and not is_fused(config),
        f"save_norm_outputs=true with offload_layers={workload.offload_layers}": workload.save_norm_outputs
        and workload.offload_layers > 0,
        f"fp8_fast_accum=true with dtype={dtype}": workload.fp8_fast_accum and dtype != "fp8",
        f"cuda_graphs=true with offload_layers={workload.offload_layers}": workload.cuda_graphs
        and workload.offload_layers > 0,
        f"cuda_graphs=true with experts in {dtype}": workload.cuda_graphs
        and config.model.experts is not None
        and dtype == "fp32",  # which reads tokens per expert on the host
        "gpu_metrics=true (needs Nsight Systems)": config.profile.gpu_metrics and not is_under_nsight(),
    }
    refused = [setting for setting, is_set in unsupported.items() if is_set]
    if refused:
        raise ConfigError(f"the native training engine does not run {', '.join(refused)}; it runs {SUPPORTED}")
    if workload.cuda_graphs and config.machine.gpu == "cpu":
        raise ConfigError("cuda_graphs=true needs a CUDA GPU; machine.gpu=cpu has none")
    _check_sizes(workload, parallel.dp)
    check_model(parallel, config.model)
    check_sequence(workload.seqlen, parallel)
    check_schedule(workload.ga, parallel)
    owner = "the model" if parallel.pp == 1 else "a rank of the pipeline"
    _check_activations(workload, owner, max_layers_per_rank(config.model.layers, parallel))
    _check_schedule(workload)
    return workload


def _unfused_reason(config: RunConfig) -> str:
    """Describe the configuration for which layers are not fused."""
    dtype, machine = config.precision.dtype, config.machine.gpu
    return f"{config.model.architecture} in {dtype} on {config.parallel.world_size} ranks of {machine}"


def _check_sizes(workload: Training, dp: int) -> None:
    for name in ("seqlen", "mbs", "ga", "steps"):
        if getattr(workload, name) < 1:
            raise ConfigError(f"workload.{name}={getattr(workload, name)}: must be at least 1")
    if workload.gbs != workload.mbs * workload.ga * dp:
        product = workload.mbs * workload.ga * dp
        raise ConfigError(
            f"gbs={workload.gbs} is not mbs * ga * dp = {workload.mbs} * {workload.ga} * {dp} = {product}"
        )
    if workload.checkpoint_every is not None and workload.checkpoint_every < 1:
        raise ConfigError(f"checkpoint_every={workload.checkpoint_every}: must be at least 1")


def _check_activations(workload: Training, owner: str, layers: int) -> None:
    if not 0 <= workload.recompute_layers <= layers:
        raise ConfigError(
            f"recompute_layers={workload.recompute_layers}: {owner} has {layers} layers, so 0 to {layers}"
        )
    remaining = layers - workload.recompute_layers
    if not 0 <= workload.offload_layers <= remaining:
        raise ConfigError(
            f"offload_layers={workload.offload_layers}: {remaining} of the {layers} layers are not recomputed, so "
            f"0 to {remaining}"
        )


def _check_schedule(workload: Training) -> None:
    if workload.lr_warmup_steps < 0:
        raise ConfigError(f"lr_warmup_steps={workload.lr_warmup_steps}: must be at least 0")
    if workload.lr_decay_steps is not None and workload.lr_decay_steps <= workload.lr_warmup_steps:
        raise ConfigError(
            f"lr_decay_steps={workload.lr_decay_steps}: must be more than lr_warmup_steps={workload.lr_warmup_steps}, "
            "where the learning rate decay begins"
        )
