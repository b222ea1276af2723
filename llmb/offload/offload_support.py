"""What this engine runs, and a refusal of everything else: a setting without effect would falsify the benchmark."""

from pathlib import Path

from llmb.config.llama_layer_shapes import check_plain_llama
from llmb.config.offload_plan import Plan
from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import ConfigError
from llmb.runtime.nsight_window import watched_by_nsight


def supported(config: RunConfig) -> tuple[OutOfCore, Plan]:
    """The workload and the plan of a configuration that this engine runs in every detail, or a ConfigError."""
    work = config.workload
    if config.engine != "native":
        raise ConfigError(f"engine={config.engine}: python -m llmb.offload is the native engine")
    if not isinstance(work, OutOfCore):
        raise ConfigError(f"a workload of kind {work.kind}: python -m llmb.offload runs kind outofcore")
    check_plain_llama(config.model)
    if work.plan is None:
        raise ConfigError("workload.plan is null: `llmb-run submit` makes it, and `llmb-run plan` shows it")
    _check(config, work, work.plan)
    _check_export(work)
    return work, work.plan


def _check(config: RunConfig, work: OutOfCore, plan: Plan) -> None:
    ranks, chunks = config.parallel.world_size, plan.chunks_per_round
    decay, rise = work.lr_decay_steps, work.lr_warmup_steps
    wrong = {
        f"{ranks} ranks: it computes on one GPU": ranks != 1,
        f"workload.steps={work.steps}: must be at least 1": work.steps < 1,
        f"checkpoint_every={work.checkpoint_every}: must be at least 1": (work.checkpoint_every or 1) < 1,
        f"lr_warmup_steps={rise}: must be at least 0": rise < 0,
        f"lr_decay_steps={decay}: must be more than lr_warmup_steps={rise}": decay is not None and decay <= rise,
        f"seqlen={work.seqlen}, but its plan is for {plan.seqlen}": plan.seqlen != work.seqlen,
        f"gbs={work.gbs}, but its plan is for {plan.gbs}": work.gbs not in (None, plan.gbs),
        f"dtype={config.precision.dtype}, but its plan is for {plan.dtype}": plan.dtype != config.precision.dtype,
        f"kv_dtype={config.precision.kv_dtype}: keys have the format of the run": config.precision.kv_dtype is not None,
        f"update={work.update}, but its plan is for {plan.update}": plan.update != work.update,
        f"clip={work.clip} needs a plan that updates in the next forward pass": work.clip is not None
        and plan.update_at != "forward",
        f"workload.plan.levels has {len(plan.levels)} letters, not {config.model.layers} layers * {chunks} chunks": len(
            plan.levels
        )
        != config.model.layers * chunks,
        "gpu_metrics=true (needs Nsight Systems)": config.profile.gpu_metrics and not watched_by_nsight(),
    }
    found = [words for words, is_so in wrong.items() if is_so]
    if found:
        raise ConfigError(f"the out-of-core engine does not run {'; nor '.join(found)}")


def _check_export(work: OutOfCore) -> None:
    """Before the run, which may take days."""
    folder = None if work.export is None else Path(work.export)
    if folder is not None and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()))):
        raise ConfigError(f"export={folder} exists already; weights are written to a new folder")
