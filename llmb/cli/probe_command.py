"""`llmb-run probe`: what this machine sustains, measured once, so that plans of out-of-core runs are right for it."""

import argparse
import os
import sys
from typing import Any

from llmb.cli.subcommand import command


def add_commands(commands: Any) -> None:
    """Register probe."""
    parser = command(
        commands, "probe", run, "measure this machine's rates for `plan`: products, attention, memory, link",
        "llmb-run probe", "llmb-run probe --gpu-type h100      # a GPU whose name is not recognised",
        "llmb-run probe --gpu-type cpu       # the CPU of a machine that has a GPU", "",
        "takes less than a minute; other work on the machine should rest meanwhile",
    )  # fmt: skip
    parser.add_argument("--gpu-type", metavar="GPU", help="what is measured; default: what this machine has")
    parser.add_argument("--json", action="store_true", help="the rates as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, keep, print."""
    import socket
    from dataclasses import asdict
    from datetime import datetime

    from llmb.config.serialization import build, to_json, write_whole
    from llmb.launch.install_root import install_root
    from llmb.launch.probe_process import probe
    from llmb.launch.run_folder import make_folder
    from llmb.perfmodel.offload.machine_rates import Rates, rates_path
    from llmb.report.plan_text import describe_rates

    gpu, name = _what_is_here(options.gpu_type or os.environ.get("GPU_TYPE") or None)
    path = rates_path(install_root(os.environ), gpu)
    make_folder(path.parent)  # found out before it is measured
    print(f"measuring {name}, in less than a minute", file=sys.stderr, flush=True)
    measured = probe("cpu" if gpu == "cpu" else "cuda", lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    source = f"measured on {socket.gethostname()}, {name}, {datetime.now():%Y-%m-%d %H:%M}"
    rates = build(Rates, {"gpu": gpu, "source": source, **measured}, "what the probe measured")
    write_whole(path, to_json(rates, indent=2) + "\n")
    if options.json:
        print(to_json(rates))
    else:
        print(f"{describe_rates(asdict(rates))}\n\nstored in {path}: plans for {gpu} go by them from now on")
    return 0


def _what_is_here(asked: str | None) -> tuple[str, str]:
    """The key and name of what is measured; it must be in this machine."""
    from llmb.errors import ConfigError, UnknownName
    from llmb.launch.local_machine import gpu_names
    from llmb.perfmodel import hardware

    wish = hardware.gpu(asked.lower()).key if asked else None
    names = gpu_names()
    if wish == "cpu" or (wish is None and not names):
        return "cpu", "this machine's CPU"
    if not names:
        raise ConfigError(f"this machine has no GPU, so no {wish} can be measured; leave out --gpu-type for its CPU")
    here = hardware.recognise(names[0])
    if here is None and wish is None:
        raise UnknownName("GPU of this machine", names[0], [f"--gpu-type {key}" for key in hardware.GPUS])
    if here is not None and wish not in (None, here):
        raise ConfigError(f"this machine has {names[0]}, which is {here}, not {wish}; leave out --gpu-type")
    return wish or str(here), names[0]
