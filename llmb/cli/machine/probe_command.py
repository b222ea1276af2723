"""`llmb-run probe`: measure this machine's sustained rates, which plans, predictions and reports use."""

import argparse
import os
import sys
from typing import Any

from llmb.cli.subcommand import command

DEFAULT_MODEL = "llama3.1-8b"
EXAMPLES = (
    "llmb-run probe                               # this machine; with several GPUs collectives among them too",
    "llmb-run probe --model qwen3-32b             # GEMMs at this model's shapes, or --model config.json",
    "llmb-run probe -w pretrain_llama3.1 -s 70b   # the same of a workload",
    "llmb-run probe --ranks 4                     # collectives among 4 processes, one per GPU; gloo on a CPU",
    "llmb-run probe --slurm --nodelist n[1-2]     # only collectives, among all GPUs of these nodes",
    "llmb-run probe --disk-path /nvme/scratch     # its disk too, for out-of-core runs with a disk tier",
    "llmb-run probe --gpu-type cpu                # the CPU of a machine that has a GPU",
    "",
    "takes less than two minutes on a GPU; stop other work on the machine meanwhile",
)


def add_commands(commands: Any) -> None:
    """Register probe."""
    summary = "measure this machine: GEMMs, attention, memory, link, launch latency, collectives, each with its spread"
    parser = command(commands, "probe", run, summary, *EXAMPLES)
    add = parser.add_argument
    add("--model", metavar="M", help=f"whose GEMM shapes are measured: a name of the catalog, or a config.json "
        f"(default {DEFAULT_MODEL})")  # fmt: skip
    add("-w", "--workload", metavar="W", help="instead: the model of a workload")
    add("-s", "--size", metavar="SIZE", help="its size")
    add("--ranks", type=int, metavar="N", help="processes for collectives; default: one per GPU, none on a CPU")
    add("--slurm", action="store_true", help="measure collectives over Slurm instead, among all GPUs of several nodes")
    add("--nodelist", metavar="NODES", help="with --slurm: these nodes; default: those of this allocation, or all idle")
    add("--disk-path", metavar="FOLDER", help="measure the disk of this folder too, with a file that is removed")
    add("--gpu-type", metavar="GPU", help="what is measured; default: what this machine has")
    add("--json", action="store_true", help="the rates as JSON, and `details` with spreads, as they are stored")


def run(options: argparse.Namespace) -> int:
    """Measure, store and print."""
    from llmb.errors import ConfigError

    if options.ranks is not None and options.ranks < 1:
        raise ConfigError("--ranks: expected a number of processes, 1 or more")
    if options.nodelist and not options.slurm:
        raise ConfigError("--nodelist names nodes of Slurm; add --slurm")
    if options.disk_path and options.slurm:
        raise ConfigError("--slurm measures only collectives; leave out --disk-path")
    if options.disk_path and not (os.path.isdir(options.disk_path) and os.access(options.disk_path, os.W_OK)):
        raise ConfigError(f"--disk-path {options.disk_path} is no folder that can be written; name one on the disk")
    return _run_on_nodes(options) if options.slurm else _run_here(options)


def _run_here(options: argparse.Namespace) -> int:
    from llmb.config.serialization import build, to_plain, write_atomic
    from llmb.launch.install_root import install_root
    from llmb.launch.local_machine import gpu_memory_bytes, gpu_names
    from llmb.launch.probe.collective_ranks import collectives_here
    from llmb.launch.run_folder import make_folder
    from llmb.launch.torch_process import run_probe
    from llmb.perfmodel.offload.machine_rates import DETAILS, Rates, machine_path, rates_path
    from llmb.perfmodel.probe.model_gemms import model_gemms
    from llmb.perfmodel.probe.probe_record import ProbeDetails, ProbeRecord, bus_gbs
    from llmb.report.machine.probe_text import describe_probe

    gpu, name = _probe_target(options.gpu_type or os.environ.get("GPU_TYPE") or None)
    shape = _model_shape(options)
    facts = _machine(gpu, name, shape.model.name)
    install = install_root(os.environ)
    paths = (rates_path(install, gpu), machine_path(install, gpu, facts["host"]))
    make_folder(paths[0].parent)  # fail before measuring
    _say(f"measuring {name}, in less than {'a minute' if gpu == 'cpu' else 'two minutes'}")
    device = "cpu" if gpu == "cpu" else "cuda"
    measured = run_probe(device, _say_progress, model_gemms(shape, on_cpu=gpu == "cpu"), options.disk_path)
    details = {**measured.pop(DETAILS, {}), **facts}
    ranks = options.ranks or (1 if gpu == "cpu" else len(gpu_names()))
    if ranks > 1:
        details["collectives"] = collectives_here(device, ranks, _say_progress)
    source = f"measured on {facts['host']}, {name}, {facts['measured_at']}"
    stored_details = build(ProbeDetails, details, "what the probe measured")
    values = {
        "gpu": gpu, "source": source, **measured, "bus_gbs": bus_gbs(stored_details.collectives),
        "device_memory_bytes": None if gpu == "cpu" else gpu_memory_bytes(),
    }  # fmt: skip
    record = ProbeRecord(rates=build(Rates, values, "what the probe measured"), details=stored_details)
    stored = {**to_plain(record.rates), DETAILS: to_plain(record.details)}
    for path in paths:
        write_atomic(path, _json(stored, indent=2) + "\n")
    if options.json:
        print(_json(stored))
    else:
        print(f"{describe_probe(record)}\n\nstored in {paths[0]} and {paths[1].name}: plans, predictions and reports "
              f"for {gpu} use it from now on")  # fmt: skip
    return 0


def _run_on_nodes(options: argparse.Namespace) -> int:
    """Measure collectives among nodes, and store them for each node."""
    from datetime import datetime

    from llmb.cli.run_options import cluster_here
    from llmb.config.serialization import build
    from llmb.launch.probe.collective_ranks import collectives_on_nodes
    from llmb.perfmodel.hardware import parse_gpu_type
    from llmb.perfmodel.probe.node_collectives import NodeCollectives
    from llmb.perfmodel.probe.probe_record import Collectives
    from llmb.report.machine.probe_text import describe_collectives

    cluster = cluster_here()
    gpu = parse_gpu_type(options.gpu_type) if options.gpu_type else cluster.gpu_type if cluster else None
    on_cpu = gpu == "cpu"
    per_node = options.ranks or (cluster.gpus_per_node if cluster else None) or (1 if on_cpu else 8)
    _say("measuring collectives among the nodes; Slurm may take a while")
    measured, nodes = collectives_on_nodes("cpu" if on_cpu else "cuda", per_node, cluster, options.nodelist, os.environ)
    collectives = build(Collectives, measured, "what the probe measured")
    print(_json(measured) if options.json else describe_collectives(collectives))
    if gpu is None:
        _say("not stored: nothing says which GPU the nodes have; name it with --gpu-type")
        return 0
    record = NodeCollectives(
        gpu=gpu, nodes=nodes, measured_at=f"{datetime.now():%Y-%m-%d %H:%M}", collectives=collectives
    )
    folder = _store_for_nodes(record)
    _say(f"stored in {folder} for {len(nodes)} nodes: reports of {gpu} runs over several nodes show it")
    return 0


def _store_for_nodes(record: Any) -> Any:
    """Write one file per node; return their folder."""
    from llmb.config.serialization import to_plain, write_atomic
    from llmb.launch.install_root import install_root
    from llmb.launch.run_folder import make_folder
    from llmb.perfmodel.probe.node_collectives import node_path

    paths = [node_path(install_root(os.environ), record.gpu, node) for node in record.nodes]
    make_folder(paths[0].parent)
    for path in paths:
        write_atomic(path, _json(to_plain(record), indent=2) + "\n")
    return paths[0].parent


def _machine(gpu: str, name: str, model: str) -> dict[str, Any]:
    """Return the machine and its state, as they are stored beside the rates."""
    import socket
    from dataclasses import asdict
    from datetime import datetime

    from llmb.formats.device_facts import device_facts
    from llmb.formats.nvidia_smi import query_gpus

    gpus = [] if gpu == "cpu" else query_gpus(links=False)[0]
    uuid = gpus[0].uuid if gpus else None
    return {
        "host": socket.gethostname(), "gpu_name": name, "gpu_uuid": uuid, "device": asdict(device_facts(uuid)),
        "measured_at": f"{datetime.now():%Y-%m-%d %H:%M}", "model": model,
    }  # fmt: skip


def _model_shape(options: argparse.Namespace) -> Any:
    """Return the shape of the model that is named, or of the default one."""
    from llmb.errors import ConfigError
    from llmb.perfmodel.shapes.hf_shape import find_or_read_shape
    from llmb.perfmodel.shapes.model_catalog import ModelShape

    if options.workload and options.model:
        raise ConfigError("name the model with --model or with -w, not with both")
    if options.size and not options.workload:
        raise ConfigError("-s names a size of -w; with --model write the whole name, such as llama3.1-8b")
    if not options.workload:
        return find_or_read_shape(options.model or DEFAULT_MODEL)
    from llmb.cli.run_options import load_recipes
    from llmb.config.run_list import split_target

    recipe, size = split_target(options.workload, load_recipes())
    return ModelShape(model=recipe.model(options.size or size or recipe.default_size))


def _json(data: Any, indent: int | None = None) -> str:
    from llmb.config.serialization import to_json

    return to_json(data, indent)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_progress(line: str) -> None:
    _say(f"  {line}")


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
