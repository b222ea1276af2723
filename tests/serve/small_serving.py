"""A small serving run and its event files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config_changes import changed
from small_models import llama_model

from llmb.config.serialization import to_plain
from llmb.config.spec import Inference, Machine, Parallel, Precision, RunConfig
from llmb.events import RequestDone, RunEnded, ServingFacts, ServingSample, read
from llmb.results.serving_figures import engine_facts
from llmb.runtime.recorder import EventRecorder
from llmb.serve.__main__ import run

CONFIG = RunConfig(
    name="small",
    target="inference_small",
    size="tiny",
    machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
    model=llama_model(name="tiny", hidden=64, ffn=128, vocab=97),
    parallel=Parallel(),
    precision=Precision(dtype="fp32"),
    workload=Inference(
        mode="max_throughput",
        use_case="chat",
        isl=12,
        osl=6,
        max_batch_size=4,
        concurrency=4,
        max_num_tokens=32,
        kv_fraction=0.05,
        num_requests=9,
        block_tokens=16,
    ),
)


@dataclass
class Served:
    """Events of a run."""

    folder: Path
    code: int | None = None

    def events(self, kind: type | None = None) -> list:
        actual = read(self.folder / "events.rank0.jsonl")
        return [event for event in actual if kind is None or isinstance(event, kind)]

    def requests(self, warmup: bool = False) -> list[RequestDone]:
        actual = [event for event in self.events(RequestDone) if event.warmup == warmup]
        return sorted(actual, key=lambda event: event.request)

    def samples(self, warmup: bool = False) -> list[ServingSample]:
        return [event for event in self.events(ServingSample) if event.warmup == warmup]

    def facts(self) -> ServingFacts:
        """Return the facts recorded when the engine was built and at the end."""
        return engine_facts(self.events())[0]

    def ended(self) -> RunEnded:
        *before, last = self.events()
        assert isinstance(last, RunEnded)
        assert not any(isinstance(event, RunEnded) for event in before)
        return last


def write_config(folder: Path, **changes: Any) -> Path:
    """Write a run folder with the changed configuration."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(to_plain(changed(CONFIG, **changes))))
    return path


def served(folder: Path, **changes: Any) -> Served:
    """Serve the changed configuration in this process."""
    path = write_config(folder, **changes)
    return Served(folder, run(path, EventRecorder(folder, 0)))
