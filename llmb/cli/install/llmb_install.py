"""llmb-install: makes $LLMB_INSTALL, describes the cluster there if there is one, and says what this machine can run.

llmb-install                     make the folder, and cluster_config.yaml where there is Slurm
llmb-install --json              the same, told as JSON
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
    Answers,
    Notebook,
    Played,
    check,
    check_new,
    read_played,
    recorded,
    write_new,
)
from llmb.cli.install.cluster_choice import asker, look
from llmb.cli.install.cluster_setup import Setup, set_up
from llmb.cli.llmb_run import guarded
from llmb.cli.subcommand import Parser
from llmb.errors import ConfigError

EXAMPLES = """examples:
  llmb-install                                         make the folder; describe the cluster, asking what is open
  llmb-install --dry-run                               say what would be made, and make nothing
  llmb-install --partition batch --gpu-type h100       answers instead of questions; also changes a file made before
  llmb-install --record answers.yaml                   keep the answers (no secrets) ...
  llmb-install --play answers.yaml                     ... and give them again, with nobody at the terminal
  LLMB_INSTALL=/shared/llmb llmb-install --json        for programs
  llmb-install verify DeepSeek-R1-FP4                  what is wrong with a folder of weights

the file: $LLMB_INSTALL/cluster_config.yaml, yours to edit; one in the current folder goes before it
"""
SHOWN = {  # field of Answers: what the table calls it
    "account": "account",
    "gpu_partition": "partition",
    "gpus_per_node": "GPUs of a node",
    "gpu_type": "their type",
    "cpu_partition": "CPU partition",
    "architecture": "architecture",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder and print the findings, or do what a command asks for."""
    said = "Make the folder for runs, describe the cluster, and say what this machine can run."
    top = Parser(prog="llmb-install", description=said, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"llmb {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    top.add_argument("--json", action="store_true", help="as JSON")
    _add_set_up(top)
    top.set_defaults(run=_install)
    verify.add_command(top.add_subparsers(metavar="COMMAND", parser_class=Parser))
    options = top.parse_args(arguments)
    return guarded(lambda: options.run(options), options.verbose)


def _add_set_up(top: argparse.ArgumentParser) -> None:
    add = top.add_argument_group("where there is Slurm").add_argument
    add("--account", metavar="NAME", help="account of the jobs (default: yours in Slurm)")
    add("--partition", metavar="NAME", help="partition of GPU jobs (default: the one with GPUs)")
    add("--cpu-partition", metavar="NAME", help="partition of jobs without GPUs")
    add("--gpus-per-node", metavar="N", type=int, help="GPUs of a node; 0: jobs ask for none")
    add("--gpu-type", metavar="TYPE", help="h100, gb200, ...; cpu where there are none")
    add("--architecture", metavar="A", help="of the nodes: x86_64 or aarch64")
    add("--record", metavar="FILE", type=Path, help="keep the answers in a new file, without secrets")
    add("--play", metavar="FILE", type=Path, help="take the answers from a file, and ask nothing")
    add("--dry-run", action="store_true", help="say what would be made, and make nothing")


def _install(options: argparse.Namespace) -> int:
    from llmb.config.serialization import to_json
    from llmb.launch.run_folder import store_path
    from llmb.report.table import render
    from llmb.results.job_store import Store

    played = read_played(options.play) if options.play else Played()
    if options.record:
        check_new(options.record)
    root = _root(played)
    if not options.dry_run:
        with Store(store_path(root)):
            pass
    setup, slurm, notes = _cluster(options, played, root)
    found = {"folder": str(root), **_findings(), "Slurm": slurm}
    if options.json:
        print(to_json({**found, "cluster": _plain(setup) if setup else None, "notes": notes}))
        return 0
    print(render(("what", "found"), [*found.items(), *_rows(setup)]))
    for note in notes:
        print(f"note: {note}")
    if options.dry_run and setup:
        print(f"\n{setup.path}, {setup.state}:\n{setup.text}", end="")
    print(f"\nnext: {_next(root, setup)}")
    return 0


def _root(played: Played) -> Path:
    """$LLMB_INSTALL, or the folder that the played file names; they may not contradict one another."""
    from llmb.launch.install_root import install_root

    named, set_to = played.install_path, os.environ.get("LLMB_INSTALL")
    if named is None:
        return install_root(os.environ)
    if set_to and install_root(os.environ) != named.absolute():
        raise ConfigError(f"install_path is {named}, LLMB_INSTALL is {set_to}; unset one, or make them agree")
    return named.absolute()


def _cluster(options: argparse.Namespace, played: Played, root: Path) -> tuple[Setup | None, str, list[str]]:
    """The set-up, and what is to be said of Slurm and besides. Without Slurm there is nothing to set up."""
    from llmb.launch.slurm.slurm_command import SlurmDown

    wishes = check(_wishes(options))
    asked_for = bool(wishes.given() or options.play or options.record)
    if not shutil.which("sbatch"):
        if asked_for:
            raise ConfigError(
                "no Slurm on this machine (sbatch not found); set up the cluster where jobs are submitted"
            )
        return None, "not found: runs are local", []
    try:
        facts = look()
    except SlurmDown as error:
        if asked_for:
            raise
        return None, "does not answer now", [str(error)]
    at_terminal = not options.play and sys.stdin.isatty() and sys.stderr.isatty()
    notebook = Notebook(None if options.dry_run else root / ".llmb" / "answers.json")
    ask = asker(sys.stdin.readline, at_terminal)
    setup = set_up(wishes, played, root, facts, ask, notebook, options.dry_run)
    if options.record and not options.dry_run:
        write_new(options.record, recorded(setup.answers, root, played.environment or {}, played.workloads))
    return setup, f"cluster {facts.cluster}", [*setup.notes, *_hidden(setup.path)]


def _hidden(path: Path) -> list[str]:
    """A file in the current folder goes before the one that was set up."""
    own = Path(path.name).absolute()
    return [f"{own} goes before it in this folder"] if own.exists() and own != path else []


def _wishes(options: argparse.Namespace) -> Answers:
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
    told = asdict(setup.answers)
    return [("cluster's file", f"{setup.path}: {setup.state}"), *((name, told[key]) for key, name in SHOWN.items())]


def _plain(setup: Setup) -> dict[str, Any]:
    return {"file": str(setup.path), "state": setup.state, **asdict(setup.answers)}


def _next(root: Path, setup: Setup | None) -> str:
    """The command to try now."""
    from shlex import quote

    from llmb.launch.install_root import install_root

    export = "" if root == install_root(os.environ) else f"export LLMB_INSTALL={quote(str(root))}; "
    on = " --on slurm" if setup else ""
    return f"{export}llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy{on}"


def _findings() -> dict[str, Any]:
    """Facts only; nothing here is needed for a dry run."""
    from llmb.launch.local_machine import gpu_names
    from llmb.perfmodel import hardware

    names = gpu_names()
    torch = importlib.util.find_spec("torch") is not None
    return {
        "python": platform.python_version(),
        "engine": "torch is installed" if torch else "not installed: pip install 'llmb[engine]'",
        "GPUs": f"{len(names)} x {names[0]}" if names else "none: use --proxy",
        "GPU type": hardware.recognise(names[0]) if names else None,
        "free disk GiB": round(shutil.disk_usage(os.path.expanduser("~")).free / hardware.GIB, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
