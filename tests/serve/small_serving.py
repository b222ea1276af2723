"""A small serving run, the same with any field changed, and what it left behind."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from llmb.config.serialization import to_plain
from llmb.config.spec import Inference, Machine, Model, Parallel, Precision, RunConfig
from llmb.events import RequestDone, RunEnded, ServingFacts, ServingSample, read
from llmb.results.serving_figures import engine_facts
from llmb.runtime.recorder import Record
from llmb.serve.__main__ import run

CONFIG = RunConfig(
    name="small",
    target="inference_small",
    size="tiny",
    machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
    model=Model(
        name="tiny", architecture="llama", layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=97
    ),
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


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    """The configuration with fields of any section changed; names are unique across sections."""
    for section in ("model", "machine", "parallel", "precision", "workload", "profile"):
        part = getattr(config, section)
        own = {name: value for name, value in changes.items() if name in {f.name for f in fields(part)}}
        config = replace(config, **{section: replace(part, **own)})
        changes = {name: value for name, value in changes.items() if name not in own}
    return replace(config, **changes)


@dataclass
class Served:
    """What a run left behind."""

    folder: Path
    code: int | None = None

    def events(self, kind: type | None = None) -> list:
        found = read(self.folder / "events.rank0.jsonl")
        return [event for event in found if kind is None or isinstance(event, kind)]

    def requests(self, warmup: bool = False) -> list[RequestDone]:
        found = [event for event in self.events(RequestDone) if event.warmup == warmup]
        return sorted(found, key=lambda event: event.request)

    def samples(self, warmup: bool = False) -> list[ServingSample]:
        return [event for event in self.events(ServingSample) if event.warmup == warmup]

    def facts(self) -> ServingFacts:
        """All that was said of the engine, first when it was open and then at the end."""
        return engine_facts(self.events())[0]

    def ended(self) -> RunEnded:
        *before, last = self.events()
        assert isinstance(last, RunEnded)
        assert not any(isinstance(event, RunEnded) for event in before)
        return last


def write_config(folder: Path, **changes: Any) -> Path:
    """A run folder with the changed configuration."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(to_plain(changed(CONFIG, **changes))))
    return path


def served(folder: Path, **changes: Any) -> Served:
    """Serve the changed configuration in this process."""
    path = write_config(folder, **changes)
    return Served(folder, run(path, Record(folder, 0)))
