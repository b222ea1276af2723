"""Configurations that the native training engine supports: a setting without effect would falsify the benchmark.

`profile.nccl_trace` is not checked here: it acts through the environment that the launcher sets.
"""

from llmb.config.lr_schedule import check_lr_steps
from llmb.config.native.fp8_recipe_limits import check_many_scales
from llmb.config.native.number_formats import check_fp8_recipe, has_fp8_experts
from llmb.config.native.one_rank import check_one_rank
from llmb.config.parallel_layout import check_model, check_schedule, check_sequence, max_layers_per_rank
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import gpu, lacks_fp8
from llmb.perfmodel.shards import has_explicit_layers

DTYPES = ("fp32", "bf16", "fp8")
STATE_FORMATS = ("master_weights", "gradients", "moments", "reduce_dtype")  # bf16 in bf16 and fp8 runs, if requested
DEGREES = ("dp", "tp", "pp", "cp", "ep", "etp")
SUPPORTED = (
    f"dtype {', '.join(DTYPES)}, every parallel layout ({', '.join(DEGREES)}, fsdp, vp), gradient accumulation (ga), "
    "recompute_layers, offload_layers, without pp cuda_graphs; with dtype bf16 or fp8 "
    f"{', '.join(f'{name}=bf16' for name in STATE_FORMATS)}, for Llama also save_norm_outputs; with dtype fp8 "
    "fp8_recipe, fp8_fast_accum, and on Hopper fp8_experts"
)


def supported_training(config: RunConfig) -> Training:
    """Return the training workload of a configuration, or raise ConfigError if a setting is not supported."""
    workload, parallel = config.workload, config.parallel
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.train is the native engine")
    if not isinstance(workload, Training):
        raise ConfigError(f"a workload of kind {workload.kind}: python -m llmb.train runs kind training")
    dtype, precision = config.precision.dtype, config.precision
    unsupported = {
        f"dtype={dtype}": dtype not in DTYPES,
        f"kv_dtype={precision.kv_dtype}": precision.kv_dtype is not None,
        **dict.fromkeys((f"cuda_graphs=true with {reason}" for reason in _graph_obstacles(config, workload)), True),
        **{
            f"{name}=bf16 with dtype={dtype}": getattr(workload, name) == "bf16" and dtype == "fp32"
            for name in STATE_FORMATS
        },
        f"save_norm_outputs=true with {config.model.architecture} in {dtype}": workload.save_norm_outputs
        and (dtype == "fp32" or not has_explicit_layers(config)),
        f"save_norm_outputs=true with offload_layers={workload.offload_layers}": workload.save_norm_outputs
        and workload.offload_layers > 0,
        f"fp8_fast_accum=true with dtype={dtype}": workload.fp8_fast_accum and dtype != "fp8",
        f"fp8_experts={workload.fp8_experts} with {config.model.name} in {dtype}": workload.fp8_experts is not None
        and not has_fp8_experts(config),
        f"fp8_experts=true on {config.launch_machine.gpu}": workload.fp8_experts is not False
        and not runs_fp8_experts(config),
    }
    refused = [setting for setting, is_set in unsupported.items() if is_set]
    if refused:
        raise ConfigError(f"the native training engine does not run {', '.join(refused)}; it runs {SUPPORTED}")
    if config.one_rank is not None:
        check_one_rank(config.one_rank.rank, workload, parallel.world_size)
    check_fp8_recipe(precision.fp8_recipe, workload.kind, dtype)
    check_fp8_gpu(config)
    if workload.cuda_graphs and config.launch_machine.gpu == "cpu":
        raise ConfigError("cuda_graphs=true needs a CUDA GPU; machine.gpu=cpu has none")
    if workload.balanced_experts and config.model.experts is None:
        raise ConfigError(f"balanced_experts=true: model {config.model.name} has no experts")
    _check_sizes(workload, parallel.dp)
    check_model(parallel, config.model)
    check_many_scales(config)
    check_sequence(workload.seqlen, parallel)
    check_schedule(workload.ga, parallel)
    owner = "the model" if parallel.pp == 1 else "a rank of the pipeline"
    _check_activations(workload, owner, max_layers_per_rank(config.model.layers, parallel))
    check_lr_steps(workload.lr_warmup_steps, workload.lr_decay_steps)
    return workload


def runs_fp8_experts(config: RunConfig) -> bool:
    """Return whether the GEMMs of experts can be in fp8 on these GPUs; a model without experts has none to run.

    torch's fp8 grouped GEMM runs on Hopper only; a CPU has a reference.
    """
    fabric = gpu(config.launch_machine.gpu).fabric
    is_hopper = fabric is not None and fabric.family == "hopper"
    return not has_fp8_experts(config) or config.launch_machine.gpu == "cpu" or is_hopper


def check_fp8_gpu(config: RunConfig) -> None:
    """Refuse fp8 on a GPU that is known to have no fp8 GEMMs."""
    key = config.launch_machine.gpu
    if config.precision.dtype == "fp8" and lacks_fp8(key):
        raise ConfigError(f"dtype fp8: {gpu(key).title} has no fp8 GEMMs; choose bf16")


def _graph_obstacles(config: RunConfig, workload: Training) -> list[str]:
    """Return why the forward and backward pass of a micro-batch cannot be captured, if CUDA graphs are requested."""
    if not workload.cuda_graphs:
        return []
    obstacles = []
    if config.parallel.pp > 1:
        obstacles.append(f"pp={config.parallel.pp}")  # torch's pipeline schedule launches from the host
    if workload.offload_layers > 0:
        obstacles.append(f"offload_layers={workload.offload_layers}")
    if config.model.experts is not None and config.precision.dtype == "fp32":
        obstacles.append("experts in fp32")  # which read tokens per expert on the host
    return obstacles


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
