"""Configurations that differ from another one in a few fields, of whatever section."""

from dataclasses import fields, replace
from typing import Any

from llmb.config.spec import RunConfig


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    """Return the configuration with these fields; `window` of training is that of the steps, not of attention."""
    for section in ("workload", "model", "machine", "parallel", "precision", "profile"):
        section_config = getattr(config, section)
        section_changes = {
            name: value for name, value in changes.items() if name in {f.name for f in fields(section_config)}
        }
        config = replace(config, **{section: replace(section_config, **section_changes)})
        changes = {name: value for name, value in changes.items() if name not in section_changes}
    return replace(config, **changes)
