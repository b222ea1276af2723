"""Settings by which two configurations are different experiments."""

from collections.abc import Sequence
from typing import Any

from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig

# Fields that tell runs apart without making them different experiments.
IDENTITY = {"name", "overrides", "recipe_row", "reference", "environment", "predicted", "workload.prediction"}


def differing_fields(configs: Sequence[RunConfig | None]) -> dict[str, list[Any]]:
    """Return the settings in which configurations differ, with the value of each."""
    flat = [settings_of(config) for config in configs]
    keys = sorted(set().union(*flat))
    values = {key: [fields.get(key) for fields in flat] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def settings_of(config: RunConfig | None) -> dict[str, Any]:
    """Return the settings that make a configuration an experiment of its own, by dotted name."""
    return _flat(to_plain(config))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}.{key}" if prefix else key
        if path not in IDENTITY:
            flat |= _flat(item, path)
    return flat
