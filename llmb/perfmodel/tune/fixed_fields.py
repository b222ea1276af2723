"""Dimensions of a search that the user fixes with `--set tp=4`, apart from the settings of the run itself.

split_settings(["tp=4", "gbs=512"])      -> {"tp": 4}, ["gbs=512"]
"""

from typing import Any

from llmb.errors import ConfigError, UnknownName

COUNTS = ("tp", "pp", "vp", "cp", "ep", "etp", "mbs")
LAYERS = ("recompute_layers", "offload_layers")  # 0: none
DIMENSIONS = (*COUNTS, "fsdp", *LAYERS)


def split_settings(settings: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fixed dimensions, checked, and the other settings as they are."""
    fixed: dict[str, Any] = {}
    others = []
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: expected FIELD=VALUE; searched fields are: {', '.join(DIMENSIONS)}")
        if name in DIMENSIONS:
            fixed[name] = _parse(name, value.strip().lower())
        else:
            others.append(text)
    return fixed, others


def _parse(name: str, text: str) -> Any:
    if name == "fsdp":
        if text not in ("true", "false"):
            raise UnknownName("value of fsdp", text, ("true", "false"))
        return text == "true"
    if name == "vp" and text == "none":
        return 1
    if not text.isascii() or not text.isdigit() or (int(text) == 0 and name not in LAYERS):
        raise ConfigError(f"{name} must be a whole number, {0 if name in LAYERS else 1} or more, got {text!r}")
    return int(text)
