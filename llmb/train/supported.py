"""What this engine runs, and a refusal of everything else: a setting without effect would falsify the benchmark.

`profile.nccl_trace` is not checked here: it acts through the environment that the launcher sets.
"""

from llmb.errors import ConfigError
from llmb.spec import RunConfig, Training

RUNS = "dtype fp32 or bf16, data parallelism (dp), gradient accumulation (ga), recompute_layers"


def supported_workload(config: RunConfig) -> Training:
    """The training workload of a configuration that this engine runs in every detail, or a ConfigError."""
    work, parallel = config.workload, config.parallel
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.train is the native engine")
    if not isinstance(work, Training):
        raise ConfigError(f"a workload of kind {work.kind}: python -m llmb.train runs kind training")
    splits = {degree: getattr(parallel, degree) for degree in ("tp", "pp", "cp", "ep", "etp")}
    settings = {
        f"dtype={config.precision.dtype}": config.precision.dtype not in ("fp32", "bf16"),
        f"kv_dtype={config.precision.kv_dtype}": config.precision.kv_dtype is not None,
        **{f"{degree}={ranks}": ranks > 1 for degree, ranks in splits.items()},
        f"vp={parallel.vp}": (parallel.vp or 1) > 1,
        f"fsdp=true with dp={parallel.dp}": parallel.fsdp and parallel.dp > 1,
        f"offload_layers={work.offload_layers}": work.offload_layers > 0,
        "cuda_graphs=true": work.cuda_graphs,
        "profile=true": config.profile.profile,
        "gpu_metrics=true": config.profile.gpu_metrics,
    }
    refused = [setting for setting, asked in settings.items() if asked]
    if refused:
        raise ConfigError(f"the native training engine does not run {', '.join(refused)}; it runs {RUNS}")
    _check_sizes(work, parallel.dp, config.model.layers)
    return work


def _check_sizes(work: Training, dp: int, layers: int) -> None:
    for name in ("seqlen", "mbs", "ga", "steps"):
        if getattr(work, name) < 1:
            raise ConfigError(f"workload.{name}={getattr(work, name)}: must be at least 1")
    if work.gbs != work.mbs * work.ga * dp:
        product = work.mbs * work.ga * dp
        raise ConfigError(f"gbs={work.gbs} is not mbs * ga * dp = {work.mbs} * {work.ga} * {dp} = {product}")
    if not 0 <= work.recompute_layers <= layers:
        raise ConfigError(f"recompute_layers={work.recompute_layers}: the model has {layers} layers, so 0 to {layers}")
