"""Small training configuration, and a helper to change its fields."""

from dataclasses import fields, replace
from typing import Any

from small_models import llama_model

from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training

CONFIG = RunConfig(
    name="small",
    target="pretrain_small",
    size="tiny",
    machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
    model=llama_model(name="tiny", ffn=64, vocab=128),
    parallel=Parallel(),
    precision=Precision(dtype="fp32"),
    workload=Training(seqlen=32, mbs=4, gbs=4, ga=1, steps=4, window=(3, 4), lr=1e-2),
)


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    """Return the configuration with fields of any section changed; `window` is that of the steps, not of attention."""
    for section in ("workload", "model", "machine", "parallel", "precision", "profile"):
        section_config = getattr(config, section)
        section_changes = {
            name: value for name, value in changes.items() if name in {f.name for f in fields(section_config)}
        }
        config = replace(config, **{section: replace(section_config, **section_changes)})
        changes = {name: value for name, value in changes.items() if name not in section_changes}
    return replace(config, **changes)
