"""Cluster side of `llmb-run submit`: where runs go, sbatch options, submission of all runs."""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmb.cli.run_options import cluster_here


def run_location(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return where runs go: local, slurm, or allocation (the one this process is in)."""
    from llmb.launch.slurm.srun import in_allocation

    if options.on in (None, "slurm") and in_allocation(environ):
        return "allocation"
    if options.on in ("local", "slurm"):
        return str(options.on)
    return "slurm" if cluster_here() else "local"


def with_cluster_settings(tasks: list[Any], location: str, recipes: Mapping[str, Any]) -> list[Any]:
    """Return tasks with the settings that variables of cluster_config.yaml name, which all others override.

    The file is for all workloads and for runs with and without profiling: a setting of others is left out.
    """
    from dataclasses import replace

    from llmb.config.overrides import from_variables
    from llmb.config.settable_fields import settable_types
    from llmb.config.step_windows import PROFILE_DETAILS

    cluster = None if location == "local" else cluster_here()
    if cluster is None:
        return tasks
    changed = []
    for task in tasks:
        request, settable = task.request, settable_types(recipes[task.workload].kind)
        variables = cluster.for_target(f"{task.workload}_{request.size}").environment
        settings = [s for s in from_variables(variables, cluster.path.name) if s.field in settable]
        if not any(setting.field == "profile" for setting in (*settings, *request.settings)):
            settings = [setting for setting in settings if setting.field not in PROFILE_DETAILS]
        changed.append(replace(task, request=replace(request, settings=(*settings, *request.settings))))
    return changed


def sbatch_options(options: argparse.Namespace) -> Any:
    """Return the sbatch options of a command line and of SBATCH_SEGMENT_SIZE."""
    from llmb.errors import ConfigError
    from llmb.launch.slurm.job_script import SbatchOverrides

    segment, variable = options.segment, os.environ.get("SBATCH_SEGMENT_SIZE", "")
    if segment is None and variable:
        segment = int(variable) if variable.isdigit() else 0
    if segment is not None and segment < 1:
        raise ConfigError("--segment: expected a number of nodes, 1 or more")
    if options.retries < 0:
        raise ConfigError("--retries: expected a number, 0 or more")
    return SbatchOverrides(
        nice=options.nice,
        nodelist=options.nodelist,
        exclude=options.exclude,
        reservation=options.reservation,
        segment=segment,
        arguments=tuple(options.slurm_arg),
    )


def refuse_sbatch_options(options: argparse.Namespace) -> None:
    """Refuse sbatch options of a run that is not submitted."""
    from llmb.errors import ConfigError
    from llmb.launch.slurm.job_script import OPTIONS_WITH_FLAGS

    named = [name for name in OPTIONS_WITH_FLAGS if getattr(options, name) is not None]
    named += ["slurm-arg"] * bool(options.slurm_arg) + ["retries"] * bool(options.retries)
    if named:
        raise ConfigError(f"--{named[0]} has no effect on a run that is not submitted; leave it out, or add --on slurm")


def fit_allocation(config: Any, environ: Mapping[str, str], force: bool) -> Any:
    """Fit a run to the allocation of this process, or raise why it does not fit."""
    from llmb.cli.memory_check import check_node_memory
    from llmb.launch.command import check_engine
    from llmb.launch.slurm.job_script import with_gpus_per_node
    from llmb.launch.slurm.srun import check_allocation_size, ranks_per_node

    check_engine(config, environ, local=False)
    cluster = cluster_here()
    config = with_gpus_per_node(config, ranks_per_node(config, environ, cluster.gpus_per_node if cluster else None))
    check_allocation_size(config, environ)
    if "SLURMD_NODENAME" in environ:  # a shell that salloc started may be on a login node
        check_node_memory(config, force=force)
    return config


def submit_all(resolved: list[tuple[Any, Any]], options: argparse.Namespace, recipes: dict[str, Any]) -> int:
    """Submit all runs, if they fit and the user agrees; print each as soon as Slurm has accepted it."""
    from llmb.cli.batch_confirmation import confirm
    from llmb.cli.memory_check import check_memory
    from llmb.cli.submit_batch import Sent, submit_jobs
    from llmb.config.load_settings import repeat_of
    from llmb.config.serialization import to_json
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import store_path
    from llmb.launch.slurm.slurm_jobs import SlurmUnavailable
    from llmb.results.job_store import Store

    def print_submitted(sent: Sent) -> None:
        if sent.error is not None:
            print(f"ERROR: {sent.request.config.name}: {sent.error}", file=sys.stderr)
        elif options.json:
            print(to_json({"job_id": sent.job_id, "name": sent.request.config.name, "run_dir": str(sent.run.path)}))
        else:
            print(f"job {sent.job_id}: {sent.request.config.name}\nrun folder: {sent.run.short_path}", flush=True)

    listed = _requests(resolved, options)
    check_memory([request.config for request, _ in listed], recipes, local=False, force=options.force)
    confirm([(request.config, repeats) for request, repeats in listed], yes=options.yes)
    requests = [
        replace(request, config=repeat_of(request.config, number))
        for request, repeats in listed
        for number in range(repeats)
    ]
    root = install_root(os.environ)
    with Store(store_path(root)) as store:
        sent = submit_jobs(requests, cluster_here(), root, store, print_submitted)
    errors = [job.error for job in sent if job.error is not None]
    unanswered = sum(isinstance(error, SlurmUnavailable) for error in errors)
    if len(errors) > unanswered:
        print(f"ERROR: {len(errors) - unanswered} of {len(sent)} jobs were not submitted", file=sys.stderr)
    if unanswered:
        text = f"Slurm does not say whether it took {unanswered} of {len(sent)} jobs"
        print(f"ERROR: {text}; once it responds, llmb-run jobs does", file=sys.stderr)
    if not errors and not options.json:
        print(f"\n{len(sent)} submitted; see: llmb-run jobs")
    return max((error.exit_code for error in errors), default=0)


def print_job_scripts(resolved: list[tuple[Any, Any]], options: argparse.Namespace) -> None:
    """Print the job scripts as the run folders would contain them."""
    from llmb.cli.submit_batch import script_for
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import RunFolder, experiment_path

    root, cluster = install_root(os.environ), cluster_here()
    for request, _ in _requests(resolved, options):
        config = request.config
        run = RunFolder(experiment_path(root, config) / f"{config.name}_TIME" / config.name)
        print(f"\n{script_for(request, run, cluster)}", end="")


def _requests(resolved: list[tuple[Any, Any]], options: argparse.Namespace) -> list[tuple[Any, int]]:
    """Return job requests with their repeats; refuse what the cluster cannot run before anything is created."""
    from llmb.cli.submit_batch import JobRequest, for_cluster

    cluster, requested = cluster_here(), sbatch_options(options)
    requests = []
    for task, config in resolved:
        request = JobRequest(
            config=for_cluster(config, cluster),
            environment=task.request.environment,
            sbatch_overrides=requested,
            retries=options.retries,
            force=options.force,
            report=not options.no_report,
        )
        requests.append((request, task.repeats))
    return requests
