"""`llmb-run probe`: measure this machine's sustained rates, which plans of out-of-core runs and predictions use."""

import argparse
import os
import sys
from typing import Any

from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register probe."""
    parser = command(
        commands, "probe", run, "measure this machine's rates for plans and predictions: compute, memory, link",
        "llmb-run probe",
        "llmb-run probe --gpu-type cpu       # the CPU of a machine that has a GPU", "",
        "takes less than a minute; stop other work on the machine meanwhile",
    )  # fmt: skip
    parser.add_argument("--gpu-type", metavar="GPU", help="what is measured; default: what this machine has")
    parser.add_argument("--json", action="store_true", help="the rates as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, store and print the rates."""
    import socket
    from dataclasses import asdict
    from datetime import datetime

    from llmb.config.serialization import build, to_json, write_atomic
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import make_folder
    from llmb.launch.torch_process import run_probe
    from llmb.perfmodel.offload.machine_rates import Rates, rates_path
    from llmb.report.plan_text import describe_rates

    gpu, name = _probe_target(options.gpu_type or os.environ.get("GPU_TYPE") or None)
    path = rates_path(install_root(os.environ), gpu)
    make_folder(path.parent)  # fail before measuring
    print(f"measuring {name}, in less than a minute", file=sys.stderr, flush=True)
    measured = run_probe(
        "cpu" if gpu == "cpu" else "cuda", lambda line: print(f"  {line}", file=sys.stderr, flush=True)
    )
    source = f"measured on {socket.gethostname()}, {name}, {datetime.now():%Y-%m-%d %H:%M}"
    rates = build(Rates, {"gpu": gpu, "source": source, **measured}, "what the probe measured")
    write_atomic(path, to_json(rates, indent=2) + "\n")
    if options.json:
        print(to_json(rates))
    else:
        print(
            f"{describe_rates(asdict(rates))}\n\nstored in {path}: plans and predictions for {gpu} use them from now on"
        )
    return 0


def _probe_target(requested: str | None) -> tuple[str, str]:
    """Return the key and name of the device to measure, which must be in this machine."""
    from llmb.errors import ConfigError
    from llmb.launch.local_machine import gpu_memory_bytes, gpu_names
    from llmb.perfmodel import hardware

    names = gpu_names()
    local_key = hardware.gpu_key(names[0], gpu_memory_bytes()) if names else "cpu"
    key = hardware.parse_gpu_type(requested, (local_key,)) if requested else None
    if key == "cpu" or (key is None and not names):
        return "cpu", "this machine's CPU"
    if not names:
        raise ConfigError(f"this machine has no GPU, so no {key} can be measured; leave out --gpu-type for its CPU")
    if key not in (None, local_key):
        raise ConfigError(f"this machine has {names[0]}, which is {local_key}, not {key}; leave out --gpu-type")
    return local_key, names[0]
