"""Does fp8 learn what bf16 learns? A small Llama on real text, from the same weights and batches in both formats.

    python bench/fp8_convergence.py [--data tokens.bin] [--steps 300] [--json FILE] [--plot FILE.png]
    python bench/fp8_convergence.py --set masters=bf16 --set gradients=bf16 --set moments=bf16

What is --set holds for the fp8 run alone, such as the narrow numbers of the rows of `train_gpu.py`; the bf16 run keeps
weights, gradients and moments in fp32.

Prints the mean loss of the last 20 steps in both formats and their ratio, aim within 1 % of 1. The text is the shipped
one (data/kjv.txt), tokenized on the spot; without a tokenizer library it is synthetic tokens, and says so. Runs on the
GPU where there is one and on the CPU otherwise, where --layers 2 --hidden 128 --steps 60 takes about a minute.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

from llmb.errors import LlmbError
from llmb.events import RunEnded, StepDone, read
from llmb.hardware import recognise
from llmb.launch.machine import gpu_names
from llmb.plain import build, to_plain
from llmb.settings import from_arguments, typed
from llmb.spec import Machine, Model, Parallel, Precision, RunConfig, Training
from llmb.tokenfile import read_header

ROOT = Path(__file__).parent.parent
LAST = 20  # steps whose mean loss is compared


def shipped_text(folder: Path) -> Path | None:
    """The shipped text as a token file, or none, with a note that says why."""
    target = folder / "kjv.bin"
    command = [sys.executable, "-m", "llmb.cli.run", "tokenize", str(ROOT / "data/kjv.txt")]
    command += ["--tokenizer", str(ROOT / "data/tokenizer.json"), "-o", str(target)]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if made.returncode == 0:
        return target
    print(f"note: synthetic tokens, since the shipped text could not be tokenized: {made.stderr.strip()}")
    return None


def configuration(options: argparse.Namespace, data: Path | None) -> RunConfig:
    names = gpu_names()  # an unknown GPU runs too: no figure here depends on which it is
    width = options.hidden
    model = Model(
        name=f"llama {options.layers} x {width}",
        architecture="llama",
        layers=options.layers,
        hidden=width,
        ffn=3 * width,
        heads=width // 64,
        kv_heads=width // 64,
        head_dim=64,
        vocab=8192 if data is None else -(-read_header(data).vocab // 16) * 16,
    )
    work = Training(
        seqlen=options.seqlen,
        mbs=options.batch,
        gbs=options.batch,
        ga=1,
        steps=options.steps,
        window=(max(1, options.steps - LAST), options.steps),
        lr=options.lr,
        lr_warmup_steps=max(1, options.steps // 10),
        lr_decay_steps=options.steps,
        data=None if data is None else str(data),
    )
    return RunConfig(
        name="fp8_convergence",
        target="fp8_convergence",
        size=model.name,
        machine=Machine(gpu=(recognise(names[0]) or "h100") if names else "cpu", gpus=1, gpus_per_node=1),
        model=model,
        parallel=Parallel(),
        precision=Precision(dtype="bf16"),
        workload=work,
    )


def with_settings(work: Training, pairs: list[str]) -> Training:
    """The same with fields set as on llmb-run's command line."""
    kinds = get_type_hints(Training)
    wishes = {
        one.field: typed(kinds.get(one.field, str), one.value, f"--set {one.field}") for one in from_arguments(pairs)
    }
    return build(Training, to_plain(work) | wishes, "--set")


def losses_of(config: RunConfig, folder: Path) -> list[float]:
    """Every step's loss."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    with (folder / "log.out").open("w") as log:
        subprocess.run([sys.executable, "-m", "llmb.train", str(folder / "config.json")], cwd=ROOT, stdout=log)
    events = list(read(folder / "events.rank0.jsonl"))
    ended = events[-1]
    if not isinstance(ended, RunEnded) or ended.status != "ok":
        sys.exit(f"the {config.precision.dtype} run did not end well: {getattr(ended, 'reason', None)}")
    return [event.loss for event in events if isinstance(event, StepDone) and event.loss is not None]


def plot(losses: dict[str, list[float]], ratio: float, path: Path) -> None:
    if find_spec("matplotlib") is None:
        print("note: no plot, matplotlib is not installed")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1))
    for dtype, values in losses.items():
        upper.plot(range(1, len(values) + 1), values, label=dtype, linewidth=1)
    upper.set_ylabel("loss")
    upper.legend()
    upper.set_title(f"fp8 / bf16 over the last {LAST} steps: {ratio:.4f}")
    lower.plot([f / b - 1 for f, b in zip(losses["fp8"], losses["bf16"], strict=True)], linewidth=1)
    lower.axhline(0, color="grey", linewidth=0.5)
    lower.set_ylabel("fp8 / bf16 - 1")
    lower.set_xlabel("step")
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a token file; default: the shipped text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the fp8 run's workload")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    losses = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(options, options.data.resolve() if options.data else shipped_text(folder))
        try:
            altered = with_settings(config.workload, options.set)
        except LlmbError as error:
            parser.error(str(error))
        for dtype, work in (("bf16", config.workload), ("fp8", altered)):
            run = replace(config, precision=Precision(dtype=dtype), workload=work)
            losses[dtype] = losses_of(run, folder / dtype)
    final = {dtype: sum(values[-LAST:]) / LAST for dtype, values in losses.items()}
    ratio = final["fp8"] / final["bf16"]
    print(f"{config.model.name}, {options.steps} steps of {options.batch} x {options.seqlen} tokens")
    for dtype, values in losses.items():
        print(f"  {dtype:5} first loss {values[0]:.4f}   mean of the last {LAST} {final[dtype]:.4f}")
    print(f"  fp8 / bf16 {ratio:.4f}")
    if options.json:
        found = {"config": to_plain(config), "set": options.set, "losses": losses, "final": final,
                 "ratio": ratio}  # fmt: skip
        options.json.write_text(json.dumps(found, indent=2))
    if options.plot:
        plot(losses, ratio, options.plot)


if __name__ == "__main__":
    main()
