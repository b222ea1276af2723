"""Speculative decoding on one H200: plain decoding and drafts in the same process, beside the model of both.

    python bench/speculative_gpu.py [--json FILE] [--batch 1,4,16] [--drafts 4] [--acceptance FILE]
    python bench/speculative_gpu.py --tiny        # very small models, with or without a GPU: shows only that it runs

Llama 3.1 8b in fp8 with a draft of Llama 3.2 1b, both of random weights, so the acceptance is forced: a probability for
each draft position, from a file ([0.8, 0.7, ...]) or 0.8, 0.7, 0.6, ... The engine is opened once for all batches. A
speed-up is the ratio of mean times per output token of the same requests; the model gives it from the bytes and FLOPs
of both models (`llmb/perfmodel/serving_time/speculative_step.py`). About two minutes.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from infer_gpu import models, tiny_models
from inference.infer_serving import Row, config_of, open_engine
from measure.device import describe_machine

from llmb.config.native.speculation import read_acceptance, with_draft
from llmb.config.spec import Inference, RunConfig
from llmb.perfmodel.serving_time.serving_fields import serving_setup_of
from llmb.perfmodel.serving_time.serving_predictor import predict_speculation
from llmb.perfmodel.serving_time.serving_setup import expected_tokens
from llmb.perfmodel.serving_time.speculative_step import Speculation
from llmb.serve.benchmark.draft_speedup import plain_engine, tpot_ms
from llmb.serve.benchmark.prompts import PromptSampler, model_info
from llmb.serve.engine import Engine
from llmb.serve.speculative.speculative_runner import SpeculativeRunner

ISL, OSL = 512, 256
FIRST_PROBABILITY, PROBABILITY_STEP = 0.8, 0.1  # of the default acceptance
REPEATS = 3
HEADER = ("batch", "plain ms", "drafts ms", "speed-up", "modelled", "ratio", "step ms", "modelled", "tokens/step",
          "expected", "acceptance")  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One batch size."""

    batch: int
    plain_ms: float  # of an output token
    drafted_ms: float
    acceptance: tuple[float, ...]
    tokens_per_step: float
    modelled: Speculation | None

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.drafted_ms

    def cells(self, stated: tuple[float, ...]) -> list[str]:
        step, model = self.drafted_ms * self.tokens_per_step, self.modelled
        steps = "-" if model is None else f"{1e3 * (model.draft_s + model.verification_s):.2f}"
        speedups = ["-", "-"] if model is None else [f"{model.speedup:.2f}", f"{self.speedup / model.speedup:.3f}"]
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance)
        tokens = [f"{self.tokens_per_step:.3f}", f"{expected_tokens(stated):.3f}"]
        times = [f"{self.plain_ms:.3f}", f"{self.drafted_ms:.3f}", f"{self.speedup:.2f}"]
        return [str(self.batch), *times, *speedups, f"{step:.2f}", steps, *tokens, rates]


def drafting_config(options: argparse.Namespace, device: torch.device, stated: tuple[float, ...]) -> RunConfig:
    """Return the run of the largest batch; every other one is served by the same engine."""
    isl, osl = (24, 16) if options.tiny else (ISL, OSL)
    batch, model = max(options.batch), (tiny_models() if options.tiny else models())[0]
    row = Row(dtype="fp8", isl=isl, osl=osl, batch=batch, budget=8192, requests=batch)
    config = config_of(model, row, device)
    assert isinstance(config.workload, Inference)
    draft = "layers:1" if options.tiny else "llama3.2-1b"
    work = replace(config.workload, speculative_tokens=len(stated), draft=draft, draft_acceptance=stated)
    return with_draft(replace(config, workload=work))


def measure(engine: Engine, config: RunConfig, batch: int, repeats: int) -> Measured:
    """Decode the same requests with and without drafts, in turns."""
    work, runner = config.workload, engine.runner
    assert isinstance(work, Inference)
    assert isinstance(runner, SpeculativeRunner)
    prompts = PromptSampler(work.seed, model_info(config.model, None)).prompts([(work.isl, work.osl)] * batch)
    for warm in (plain_engine(engine), engine):
        tpot_ms(warm, work, frozenset(), prompts)
    runner.counts.reset()
    times = [
        (tpot_ms(plain_engine(engine), work, frozenset(), prompts), tpot_ms(engine, work, frozenset(), prompts))
        for _ in range(repeats)
    ]
    plain_ms, drafted_ms = (median(float(pair[side] or 0) for pair in times) for side in (0, 1))
    counts = runner.counts
    acceptance = tuple(
        accepted / trials if trials else 0.0 for accepted, trials in zip(counts.accepted, counts.trials, strict=True)
    )
    tokens = 1 + sum(counts.accepted) / counts.verifications
    modelled = None
    if config.machine.gpu != "cpu":
        alone = replace(config, workload=replace(work, concurrency=batch, max_batch_size=batch, num_requests=batch))
        modelled = predict_speculation(serving_setup_of(alone), acceptance)
    return Measured(batch, plain_ms, drafted_ms, acceptance, tokens, modelled)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,4,16", help="requests at once, separated by commas; default 1,4,16")
    parser.add_argument(
        "--drafts", type=int, default=4, help="draft tokens of a step; default 4, or as in --acceptance"
    )
    parser.add_argument("--acceptance", type=Path, metavar="FILE", help="a probability for each draft position")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --tiny runs anywhere")
    if not all(batch.isdecimal() and int(batch) for batch in options.batch.split(",")):
        parser.error(f"--batch: expected numbers such as 1,4,16, got {options.batch}")
    options.batch = [int(batch) for batch in options.batch.split(",")]
    return options


def main() -> None:
    options = parse_arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    usual = [max(0.0, round(FIRST_PROBABILITY - PROBABILITY_STEP * place, 3)) for place in range(options.drafts)]
    stated = tuple(read_acceptance(str(options.acceptance)) or () if options.acceptance else usual)
    config = drafting_config(options, device, stated)
    work = config.workload
    assert isinstance(work, Inference)
    assert work.draft_model is not None
    print(describe_machine(device), flush=True)
    draft = work.draft_model.name
    print(f"{config.model.name} {config.precision.dtype}, draft {draft}, {work.speculative_tokens} tokens a step")
    print(
        f"acceptance forced at {' '.join(map(str, stated))}: the speed of that acceptance, not a property of the draft"
    )
    engine = open_engine(config, device, work.isl + work.osl)
    print("  ".join(f"{name:>11}" for name in HEADER))
    done = []
    for batch in options.batch:
        done.append(measure(engine, config, batch, 1 if options.tiny else REPEATS))
        print("  ".join(f"{cell:>11}" for cell in done[-1].cells(stated)), flush=True)
    if options.json:
        rows = [asdict(row) | {"speedup": row.speedup} for row in done]
        options.json.write_text(
            json.dumps({"draft": draft, "stated_acceptance": stated, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
