"""Cost of parallelism on this machine: every kind of layout over 1, 2 and 4 gloo ranks, and every pass at size 1.

    python bench/parallel.py [--json FILE] [--only overhead]

1. tokens/s of the same work under each layout, and the share of a step in which each collective was under way (rank 0,
   from a trace). All ranks share this machine's cores: the figures compare layouts, they do not foretell a cluster.
2. the time of a training step after each pass at size 1, as a ratio to the plain model's, measured in turns with it;
   beside it the ratio of the plain model to itself, which is what the measurement cannot tell apart.      aim < 1.01
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from training.train_process import trained_steps

from llmb.config.model import Model, MoEConfig
from llmb.config.spec import Machine, Parallel, Precision, Profile, RunConfig, Training
from llmb.errors import LaunchError
from llmb.models.architectures import Network, build_model
from llmb.report.table import render
from llmb.train.kernel_intervals import KernelInterval, clip, resolve_overlaps
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.context_parallel import apply_context_parallel
from llmb.train.parallel.expert_parallel import apply_expert_parallel
from llmb.train.parallel.fsdp import ShardedParameters
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.pipeline_stages import build_stages
from llmb.train.parallel.tensor_parallel import apply_tensor_parallel
from llmb.train.parallelize import apply_passes, bucket_formats, init_weights

SIZES = {"layers": 4, "hidden": 256, "ffn": 1024, "heads": 8, "kv_heads": 4, "head_dim": 32, "vocab": 4096}
LLAMA = Model(name="llama", architecture="llama", **SIZES)
GROK = replace(
    LLAMA, name="grok1", architecture="grok1", post_norms=True, activation="gelu",
    experts=MoEConfig(count=4, top_k=2, ffn=512, renormalise=False),
)  # fmt: skip
WORK = Training(seqlen=256, mbs=1, gbs=8, ga=8, steps=12, window=(4, 12), lr=1e-3)
TRACED = range(9, 12)
LAYOUTS: list[tuple[Model, dict[str, Any]]] = [
    (LLAMA, {}),
    *[(LLAMA, layout) for layout in ({"dp": 2}, {"dp": 2, "fsdp": True}, {"tp": 2}, {"pp": 2}, {"cp": 2})],
    *[(LLAMA, layout) for layout in ({"dp": 4}, {"dp": 4, "fsdp": True}, {"tp": 4}, {"pp": 4}, {"cp": 4})],
    *[(LLAMA, layout) for layout in ({"pp": 2, "vp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "fsdp": True})],
    (LLAMA, {"dp": 4, "fsdp": True, "overlap_gather": False, "overlap_reduce": False}),
    (GROK, {}),
    (GROK, {"dp": 2, "ep": 2}),
    (GROK, {"tp": 2, "ep": 2}),
    (GROK, {"tp": 2, "dp": 2, "ep": 2, "etp": 2}),
]
OVERHEAD_ROUNDS = 60


def configuration(model: Model, layout: dict[str, Any]) -> RunConfig:
    parallel = Parallel(**layout)
    ranks = parallel.world_size
    return RunConfig(
        name="bench", target="bench", size="small",
        machine=Machine(gpu="cpu", gpus=ranks, gpus_per_node=ranks),
        model=model, parallel=parallel, precision=Precision(dtype="fp32"),
        workload=replace(WORK, ga=WORK.gbs // (WORK.mbs * parallel.dp)),
        profile=Profile(profile=True, profile_start=TRACED.start, profile_stop=TRACED.stop),
    )  # fmt: skip


def layout_row(model: Model, layout: dict[str, Any]) -> dict[str, Any]:
    """One run over its ranks: its speed, and how long each collective was under way."""
    config = configuration(model, layout)
    ranks = config.parallel.world_size
    os.environ["OMP_NUM_THREADS"] = "1"  # of a rank, whatever the layout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            steps = trained_steps(config, folder)
        except LaunchError as error:
            sys.exit(f"{model.name} {layout}: {error}")
        untraced = [e.seconds for e in steps if not e.warmup and e.step not in TRACED]
        fractions = collective_shares(folder / "profile" / "trace.rank0.json.gz")
    spelled = " ".join(f"{key}{value}" for key, value in layout.items()) or "one process"
    speed = WORK.gbs * WORK.seqlen / statistics.median(untraced)
    return {"model": model.name, "ranks": ranks, "layout": spelled, "tokens/s": speed, "under way": fractions}


def collective_shares(path: Path) -> dict[str, float]:
    """Return the fraction of the traced steps in which each kind of collective ran, overlapped or not."""
    with gzip.open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in {f"step {n}" for n in TRACED}]
    wall = sum(end - start for start, end in steps)
    kinds: dict[str, list[KernelInterval]] = {}
    for event in events:
        if event["name"].startswith("gloo:"):
            kind = event["name"].removeprefix("gloo:")
            kinds.setdefault(kind, []).append(KernelInterval(event["ts"], event["ts"] + event["dur"], kind, kind))
    under_way = {kind: clip(resolve_overlaps(kinds[kind], (kind,)), steps) for kind in sorted(kinds)}
    return {kind: sum(each.end - each.start for each in intervals) / wall for kind, intervals in under_way.items()}


def plain_step(model: Model) -> Callable[[], None]:
    """A training step of the plain model with torch's own optimizer and clipping."""
    network = build_model(model)
    network.init_weights(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    tokens, labels = batch(model)

    def step() -> None:
        network(tokens, labels).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def passed_step(model: Model, apply: Callable[[Network, Mesh], object]) -> Callable[[], None]:
    """A training step of a model that one or all passes went over, with the engine's parameters and optimizer."""
    mesh = Mesh(0, 1, torch.device("cpu"))
    network = build_model(model)
    apply(network, mesh)
    sharded = ShardedParameters(network, mesh, bucket_formats(configuration(model, {}), WORK), mesh.device)
    init_weights(network, sharded, 1, mesh.device)
    optimizer = Optimizer([sharded], mesh)
    tokens, labels = batch(model)

    def step() -> None:
        network(tokens, labels).backward()
        sharded.end_step()
        optimizer.update(1e-3)

    return step


def batch(model: Model) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(model.vocab, (1, WORK.seqlen + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def overhead_rows() -> list[dict[str, Any]]:
    """Time each pass alone and all together, alternating with the plain model."""
    config = configuration(GROK, {})
    passes: dict[str, Callable[[Network, Mesh], object]] = {
        "none, the engine's parameters and optimizer": lambda network, mesh: None,
        "pipeline": build_stages,
        "context": apply_context_parallel,
        "experts": lambda network, mesh: apply_expert_parallel(network, mesh, 1.0),
        "tensors": apply_tensor_parallel,
        "all": lambda network, mesh: apply_passes(network, config, replace(WORK, ga=1), mesh),
    }
    rows = [{"pass": "the plain model, against itself", **ratio(plain_step(GROK), plain_step(GROK))}]
    return rows + [
        {"pass": name, **ratio(plain_step(GROK), passed_step(GROK, apply))} for name, apply in passes.items()
    ]


def ratio(plain: Callable[[], None], candidate: Callable[[], None]) -> dict[str, float]:
    """Median of the ratios of neighbouring steps, and the middle half of them."""
    for _ in range(5):
        plain(), candidate()
    ratios = []
    for number in range(OVERHEAD_ROUNDS):
        first, second = (plain, candidate) if number % 2 else (candidate, plain)
        times = {}
        for step in (first, second):
            start = time.perf_counter()
            step()
            times[step] = time.perf_counter() - start
        ratios.append(times[candidate] / times[plain])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"x of plain": middle, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("layouts", "overhead"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if options.only != "layouts":
        results["overhead"] = overhead_rows()
        cells = [
            [r["pass"], f"{r['x of plain']:.4f}", f"{r['low']:.4f} .. {r['high']:.4f}"] for r in results["overhead"]
        ]
        print(render(["pass at size 1", "x of plain", "middle half"], cells))
    if options.only != "overhead":
        results["layouts"] = []
        for model, layout in LAYOUTS:
            row = layout_row(model, layout)
            results["layouts"].append(row)
            listed = (
                ", ".join(f"{kind} {100 * fraction:.0f} %" for kind, fraction in row["under way"].items()) or "none"
            )
            print(
                f"{row['model']:6} {row['ranks']} ranks  {row['layout']:45} {row['tokens/s']:8.0f} tokens/s   {listed}"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
