"""`llmb-run doctor`: is this machine, or every node of a cluster, fit to be measured."""

import argparse
import os
import sys
from typing import Any

from llmb.cli.subcommand import command

EXAMPLES = (
    "llmb-run doctor",
    "llmb-run doctor --json | jq '.findings[] | select(.level != \"ok\")'",
    "llmb-run doctor --slurm                      # all idle nodes of the partition in cluster_config.yaml",
    "llmb-run doctor --slurm --nodelist n[1-8]    # these nodes",
    "",
    "exit codes: 0 no problem (there may be warnings), 1 a problem, 2 the nodes could not be reached",
    "what each line means: docs/doctor.md",
)


def add_commands(commands: Any) -> None:
    """Register doctor."""
    summary = "look at GPUs, host and software: each line ok, warning or problem, and what to do"
    parser = command(commands, "doctor", run, summary, *EXAMPLES)
    add = parser.add_argument
    add("--slurm", action="store_true", help="on every node, one task each, and which node differs from the others")
    add("--nodelist", metavar="NODES", help="with --slurm: these nodes; default: those of this allocation, or all idle")
    add("--json", action="store_true", help="as JSON: findings and facts; with --slurm of each node, and what differs")


def run(options: argparse.Namespace) -> int:
    """Print the findings."""
    from llmb.errors import ConfigError

    if options.nodelist and not options.slurm:
        raise ConfigError("--nodelist names nodes of Slurm; add --slurm")
    return _run_on_nodes(options) if options.slurm else _run_here(options)


def _run_here(options: argparse.Namespace) -> int:
    from llmb.config.serialization import to_json
    from llmb.launch.doctor.examination import examine
    from llmb.launch.doctor.finding import has_problem
    from llmb.report.machine.doctor_text import describe_machine
    from llmb.report.terminal.colour import print_report

    examination = examine(os.environ)
    if options.json:
        print(to_json(examination))
    else:
        print_report(describe_machine(examination.findings))
    return int(has_problem(examination.findings))


def _run_on_nodes(options: argparse.Namespace) -> int:
    from llmb.cli.run_options import cluster_here
    from llmb.config.serialization import to_json
    from llmb.launch.doctor.finding import has_problem
    from llmb.launch.doctor.node_examinations import examine_cluster
    from llmb.report.machine.doctor_text import describe_nodes
    from llmb.report.terminal.colour import print_report

    print("asking the nodes, one task each; Slurm may take a while", file=sys.stderr, flush=True)
    examined = examine_cluster(cluster_here(), options.nodelist, os.environ)
    if options.json:
        print(to_json(examined))
    else:
        not_asked = [(n.name, n.state + (f" ({n.reason})" if n.reason else "")) for n in examined.not_asked]
        findings = {node.host: node.findings for node in examined.nodes}
        print_report(describe_nodes(findings, examined.odd, examined.silent, not_asked))
    return int(bool(examined.silent) or any(has_problem(node.findings) for node in examined.nodes))
