"""Choice of the rank that runs alone, on one GPU of this machine, for `--one-rank`.

with_one_rank(config, OneRankRequest(rank=12, machine=this_machine), uses_proxy=False)
describe_rank(config)      -> "rank 28 of 32, pipeline stage 8 of 8 (layers 70-79)"
"""

from dataclasses import replace

from llmb.config.row_selection import OneRankRequest
from llmb.config.spec import Machine, OneRank, Override, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.shards import rank_flops, rank_stages

CPU = Machine(gpu="cpu", gpus=1, gpus_per_node=1)
BALANCED = "balanced_experts"


def with_one_rank(config: RunConfig, request: OneRankRequest, uses_proxy: bool) -> RunConfig:
    """Return the run of one rank of a configuration: the requested one, or one with the most work.

    It runs on this machine's GPU; without one a proxy runs on the CPU, and anything else is for a GPU as requested.
    """
    if not isinstance(config.workload, Training) or config.engine != "native":
        raise ConfigError(
            f"--one-rank runs training by the native engine, not {config.workload.kind} by {config.engine}"
        )
    here = CPU if uses_proxy else replace(config.machine, gpus=1, gpus_per_node=1)
    rank = busiest_rank(config) if request.rank is None else request.rank
    check_one_rank(rank, config.workload, config.parallel.world_size)
    one_rank = OneRank(rank=rank, machine=here if config.machine.gpu == "cpu" else request.machine or here)
    return balance_experts(replace(config, one_rank=one_rank, name=f"{config.name}_rank{rank}"))


def balance_experts(config: RunConfig) -> RunConfig:
    """Route evenly, unless set otherwise: without its peers a rank has the load of its own untrained router only."""
    work = config.workload
    assert isinstance(work, Training)
    if config.model.experts is None or work.balanced_experts or any(o.field == BALANCED for o in config.overrides):
        return config
    change = Override(field=BALANCED, value=True, replaced=False, source="--one-rank")
    return replace(config, workload=replace(work, balanced_experts=True), overrides=(*config.overrides, change))


def check_one_rank(rank: int, workload: Training, ranks: int) -> None:
    """Refuse a rank that the layout does not have, and checkpoints of a part of the model."""
    if ranks == 1:
        raise ConfigError("--one-rank: the layout has one rank; leave it out, or choose a larger --scale")
    if not 0 <= rank < ranks:
        raise ConfigError(f"--one-rank {rank}: the layout has the ranks 0 to {ranks - 1}")
    for name in ("checkpoint_every", "resume"):
        if getattr(workload, name) is not None:
            raise ConfigError(f"{name} with --one-rank: one rank does not have the whole model; leave one of them out")


def busiest_rank(config: RunConfig) -> int:
    """Return the first rank of the pipeline stage with the most FLOPs: most often the last, with the LM head."""
    pp = config.parallel.pp
    stage = max(range(pp), key=lambda stage: rank_flops(config, stage))
    return stage * (config.parallel.world_size // pp)


def describe_rank(config: RunConfig) -> str:
    """Return which rank of which layout runs alone."""
    assert config.one_rank is not None
    assert config.pipeline_rank is not None
    text = f"rank {config.one_rank.rank} of {config.parallel.world_size}"
    if config.parallel.pp == 1:
        return text
    stages = [stage.layers for stage in rank_stages(config, config.pipeline_rank) if stage.layers]
    layers = ", ".join("-".join(map(str, dict.fromkeys((stage[0], stage[-1])))) for stage in stages)
    return f"{text}, pipeline rank {config.pipeline_rank} of {config.parallel.pp} with layers {layers}"
