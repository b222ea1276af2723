"""Settings of a run that tell it apart from other runs of the same workload, size, dtype and scale.

run_settings(config) -> "chat 128/128 max_throughput max_batch_size=8"     words joined by spaces
"""

from pathlib import PurePath
from typing import Any

from llmb.config.load_settings import LoadSettings
from llmb.config.spec import Inference, RunConfig

SHOWN_OTHERWISE = {"use_case", "mode", "isl", "osl", "profile", "engine", "gpu", "gpus"}
WITHOUT_INFLUENCE = {"slurm_params", "time_limit_s", "stall_limit_s", "max_restarts"}  # on what is measured
ONE_RANK_WORD = "one-rank="  # begins the word of a run of one rank
FAULTS_WORD = "injected-faults="  # begins the word of a run that breaks on purpose
DEGREES = ("tp", "pp", "cp", "ep")


def run_settings(config: RunConfig) -> str:
    """Return use case, engine, proxy, rank, faults, overrides and variables of the ranks, one word each."""
    words = []
    work = config.workload
    if isinstance(work, Inference):
        words += [work.use_case, f"{work.isl}/{work.osl}", work.mode]
    if isinstance(work, LoadSettings):
        words += [config.name.removeprefix("load_"), work.base_url.partition("://")[2]]
    if config.engine != "native":
        words.append(config.engine)
    if config.proxy is not None:
        words += ["true-width"] if config.proxy.startswith("true width") else []
        words += [f"{name}={degree}" for name in DEGREES if (degree := getattr(config.parallel, name)) > 1]
    if config.one_rank is not None:
        words.append(f"{ONE_RANK_WORD}{config.one_rank.rank}")
    if config.fault_injection is not None:
        words.append(f"{FAULTS_WORD}{len(config.fault_injection.faults)}")
    if config.profile.profile:
        words.append("profile")
    values = {o.field: o.value for o in config.overrides if _is_chosen(o.source)}
    words += [
        f"{field}={_text(value)}"
        for field, value in values.items()
        if field not in SHOWN_OTHERWISE | WITHOUT_INFLUENCE and f"{field}={value}" not in words
    ]
    words += [f"{name}={value}" for name, value in config.environment.items()]
    return " ".join("_".join(word.split()) for word in words)


def _is_chosen(source: str) -> bool:
    """Return whether a user chose this override, on the command line, in the environment or in a bulk file.

    The others, such as the window of a shorter run, follow from these.
    """
    return source.startswith(("-", "environment ")) or source.endswith((".yaml", ".yml"))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    text = str(value)
    return PurePath(text).name if "/" in text else text
