"""llmb-install: creates $LLMB_INSTALL, describes the cluster if there is one, and prints what this machine can run.

llmb-install                     create the folder, and cluster_config.yaml where there is Slurm
llmb-install --json              the same, printed as JSON
llmb-install verify FOLDER       missing, short, extra or corrupted files of downloaded weights
"""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmb import __version__
from llmb.cli.install import verify
from llmb.cli.install.cluster_answers import (
    AnswerFile,
    Answers,
    SavedAnswers,
    answer_file_text,
    check,
    check_new_file,
    read_answer_file,
    write_new_file,
)
from llmb.cli.install.cluster_choice import facts_text, query_cluster, terminal_prompt
from llmb.cli.install.cluster_setup import Setup, set_up_cluster
from llmb.cli.llmb_run import guarded
from llmb.cli.subcommand import Parser, add_help_command
from llmb.errors import ConfigError

EXAMPLES = """examples:
  llmb-install                                         create the folder; describe the cluster, asking what is open
  llmb-install --dry-run                               print what would be created, and create nothing
  llmb-install --partition batch --gpu-type h100       answers instead of questions; also changes an existing file
  llmb-install --record answers.yaml                   write the answers to a file (no secrets) ...
  llmb-install --play answers.yaml                     ... and use them again, without a terminal
  LLMB_INSTALL=/shared/llmb llmb-install --json        for programs
  LLMB_INSTALL=/shared/llmb llmb-install --shared hpc  one folder for all users of the group hpc
  llmb-install verify DeepSeek-R1-FP4                  what is wrong with a folder of weights

the file: $LLMB_INSTALL/cluster_config.yaml, yours to edit; one in the current folder takes precedence
"""
TABLE_ROWS = {  # field of Answers: its name in the table
    "account": "account",
    "gpu_partition": "partition",
    "gpus_per_node": "GPUs of a node",
    "gpu_type": "their type",
    "cpu_partition": "CPU partition",
    "architecture": "architecture",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the folder and print the findings, or run a subcommand."""
    description = "Create the folder for runs, describe the cluster, and print what this machine can run."
    top = Parser(prog="llmb-install", description=description, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"llmb {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    top.add_argument("--json", action="store_true", help="as JSON")
    help_text = "let all users of a group run in the folder: group, setgid bit and ACLs of all in it"
    top.add_argument("--shared", metavar="GROUP", help=help_text)
    _add_set_up(top)
    top.set_defaults(run=_install)
    commands = top.add_subparsers(metavar="COMMAND", parser_class=Parser)
    verify.add_command(commands)
    add_help_command(top, commands)
    options = top.parse_args(arguments)
    return guarded(lambda: options.run(options), options.verbose)


def _add_set_up(top: argparse.ArgumentParser) -> None:
    add = top.add_argument_group("where there is Slurm").add_argument
    add("--account", metavar="NAME", help="account of jobs (default: yours in Slurm)")
    add("--partition", metavar="NAME", help="partition of GPU jobs (default: the one with GPUs)")
    add("--cpu-partition", metavar="NAME", help="partition of jobs without GPUs")
    add("--gpus-per-node", metavar="N", type=int, help="GPUs of a node; 0: jobs request none")
    add("--gpu-type", metavar="TYPE", help="h100, gb200, ...; cpu where there are none")
    add("--architecture", metavar="A", help="of the nodes: x86_64 or aarch64")
    add("--record", metavar="FILE", type=Path, help="write the answers to a new file, without secrets")
    add("--play", metavar="FILE", type=Path, help="read the answers from a file, and ask nothing")
    add("--dry-run", action="store_true", help="print what would be created, and create nothing")


def _install(options: argparse.Namespace) -> int:
    from llmb.cli.install.recipe_folders import create_recipe_folders
    from llmb.cli.install.shared_folder import share_folder
    from llmb.config.serialization import to_json
    from llmb.launch.command import engine_install_command
    from llmb.launch.run_folder import store_path
    from llmb.report.table import render
    from llmb.results.job_store import Store

    answer_file = read_answer_file(options.play) if options.play else AnswerFile()
    if options.record:
        check_new_file(options.record)
    root = _root(answer_file)
    folder_notes = [f"{root} would be shared with group {options.shared}"] if options.shared else []
    if not options.dry_run:
        shared_notes = share_folder(root, options.shared) if options.shared else []
        with Store(store_path(root)):
            pass
        folder_notes = shared_notes + create_recipe_folders(root)
    setup, slurm, notes = _cluster(options, answer_file, root)
    notes += folder_notes
    findings = {"folder": str(root), **_findings(), "Slurm": slurm}
    if options.json:
        print(to_json({**findings, "cluster": _plain(setup) if setup else None, "notes": notes}))
        return 0
    print(render(("what", "found"), [*findings.items(), *_rows(setup)]))
    for note in notes:
        print(f"note: {note}")
    if options.dry_run and setup:
        print(f"\n{setup.path}, {setup.state}:\n{setup.text}", end="")
    print(f"\n{_variables(root)}")
    if not _has_torch():
        print(f"\nruns need torch; install it where they run: {engine_install_command()}")
    print(f"\nnext: {_next(root, setup)}")
    return 0


def _root(answer_file: AnswerFile) -> Path:
    """Return $LLMB_INSTALL, or the folder in the answer file; they must not disagree."""
    from llmb.launch.install_root import install_root

    folder, variable = answer_file.install_path, os.environ.get("LLMB_INSTALL")
    if folder is None:
        return install_root(os.environ)
    if variable and install_root(os.environ) != folder.absolute():
        raise ConfigError(f"install_path is {folder}, LLMB_INSTALL is {variable}; unset one, or make them agree")
    return folder.absolute()


def _cluster(options: argparse.Namespace, answer_file: AnswerFile, root: Path) -> tuple[Setup | None, str, list[str]]:
    """Set up the cluster; return its Setup (None without Slurm), the state of Slurm in words, and notes."""
    from llmb.launch.slurm.slurm_command import SlurmUnavailable

    from_options = check(_options_as_answers(options))
    requires_slurm = bool(from_options.non_null() or options.play or options.record)
    if not shutil.which("sbatch"):
        if requires_slurm:
            raise ConfigError(
                "no Slurm on this machine (sbatch not found); set up the cluster where jobs are submitted"
            )
        return None, "not found: runs are local", []
    try:
        facts = query_cluster()
    except SlurmUnavailable as error:
        if requires_slurm:
            raise
        return None, "does not respond", [str(error)]
    if options.dry_run and not options.json:  # before anything is asked, or is missing where nobody can be asked
        print(f"{facts_text(facts)}\n", flush=True)
    at_terminal = not options.play and sys.stdin.isatty() and sys.stderr.isatty()
    saved_answers = SavedAnswers(None if options.dry_run else root / ".llmb" / "answers.json")
    ask = terminal_prompt(sys.stdin.readline, at_terminal)
    setup = set_up_cluster(from_options, answer_file, root, facts, ask, saved_answers, options.dry_run)
    if options.record and not options.dry_run:
        write_new_file(
            options.record, answer_file_text(setup.answers, root, answer_file.environment or {}, answer_file.workloads)
        )
    return setup, f"cluster {facts.cluster}", [*setup.notes, *_hidden(setup.path)]


def _hidden(path: Path) -> list[str]:
    """Return a note if a file in the current folder takes precedence over the one that was set up."""
    local = Path(path.name).absolute()
    return [f"{local} takes precedence in this folder"] if local.exists() and local != path else []


def _options_as_answers(options: argparse.Namespace) -> Answers:
    return Answers(
        account=options.account,
        gpu_partition=options.partition,
        cpu_partition=options.cpu_partition,
        gpus_per_node=options.gpus_per_node,
        gpu_type=options.gpu_type,
        architecture=options.architecture,
    )


def _rows(setup: Setup | None) -> list[tuple[str, Any]]:
    if setup is None:
        return []
    answers = asdict(setup.answers)
    return [
        ("cluster's file", f"{setup.path}: {setup.state}"),
        *((name, answers[key]) for key, name in TABLE_ROWS.items()),
    ]


def _plain(setup: Setup) -> dict[str, Any]:
    return {"file": str(setup.path), "state": setup.state, **asdict(setup.answers)}


def _variables(root: Path) -> str:
    """Return the variables that NVIDIA's recipe documents use, as this installation has them."""
    from shlex import quote

    from llmb.cli.install.recipe_folders import repo_path

    return "\n".join(
        (
            "for the command lines of NVIDIA's recipe documents:",
            f"  export LLMB_INSTALL={quote(str(root))} LLMB_REPO={quote(str(repo_path(root)))}",
            "  export LLMB_WORKLOAD=$LLMB_INSTALL/workloads/pretrain_llama3.1    # or another workload",
        )
    )


def _next(root: Path, setup: Setup | None) -> str:
    """Return the command to try next."""
    from shlex import quote

    from llmb.launch.install_root import install_root

    dry = "" if _has_torch() else " --dry-run"
    export = "" if root == install_root(os.environ) else f"export LLMB_INSTALL={quote(str(root))}; "
    on = " --on slurm" if setup else ""
    return f"{export}llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy{on}{dry}"


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _findings() -> dict[str, Any]:
    """Return facts about this machine; none is needed for a dry run."""
    from llmb.launch.local_machine import gpu_memory_bytes, gpu_names
    from llmb.perfmodel import hardware

    names = gpu_names()
    return {
        "python": platform.python_version(),
        "engine": "torch is installed" if _has_torch() else "torch is not installed",
        "GPUs": f"{len(names)} x {names[0]}" if names else "none: use --proxy",
        "GPU type": hardware.gpu_key(names[0], gpu_memory_bytes()) if names else None,
        "free disk GiB": round(shutil.disk_usage(os.path.expanduser("~")).free / hardware.GIB, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
