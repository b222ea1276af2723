"""Check that this machine has the engine, the GPUs and the data of a run, before anything is created or planned."""

from pathlib import Path
from typing import Any

DRY_RUN = ", --dry-run shows the run"


def check_runs_here(config: Any, replicas: int = 1, advice: str = DRY_RUN) -> None:
    """Refuse a run whose engine or GPUs this machine does not have, before anything is created."""
    from llmb.errors import ConfigError
    from llmb.formats.token_file import read_header
    from llmb.launch.command import check_engine

    check_engine(config)
    if config.limits.slurm_params:
        raise ConfigError("ADDITIONAL_SLURM_PARAMS has no effect on a local run; unset it, or add --on slurm")
    data = getattr(config.workload, "data", None)
    if data is not None:
        read_header(Path(data))  # refuses a file that the ranks could not read
    if config.engine == "openai":  # the GPUs are the server's
        from llmb.config.load_settings import check_load, load_settings_of
        from llmb.loadgen.load_test import api_key_of

        load = load_settings_of(config)
        assert load is not None
        check_load(load)
        api_key_of(load)
        return
    uses_proxy = "gpu" not in config.recipe_row  # only proxies run on any machine
    _check_gpus_here(config.launch_machine.gpu, config.launch_machine.gpus * replicas, uses_proxy, advice)


def check_gpus_before_planning(tasks: list[Any], recipes: dict[str, Any]) -> None:
    """Refuse out-of-core runs on a machine without their GPU before plans are searched, for seconds each."""
    from llmb.config.row_selection import choose_row, gpu_of

    for task in tasks:
        recipe, request = recipes[task.workload], task.request
        if recipe.kind == "outofcore":
            row, _ = choose_row(recipe, request, {})
            gpu = request.gpu or ("cpu" if request.uses_proxy else gpu_of(row, recipe))
            _check_gpus_here(gpu, request.gpus, request.uses_proxy)


def _check_gpus_here(gpu: str, requested: int, uses_proxy: bool, advice: str = DRY_RUN) -> None:
    from llmb.errors import ConfigError
    from llmb.launch.local_machine import gpu_names

    if gpu == "cpu":
        return
    here = len(gpu_names())
    if here == 0:
        layout = f" (in {gpu}'s layout: --layout {gpu})" if requested > 1 and uses_proxy else ""
        raise ConfigError(
            f"{requested} x {gpu} requested, this machine has no GPU; "
            f"--proxy without --gpu-type runs a small proxy on the CPU{layout}{advice}"
        )
    if requested > here:
        raise ConfigError(f"{requested} GPUs requested, this machine has {here}; choose --scale {here} or less{advice}")
