"""What is a secret, and how it is kept out of every file: masked in settings, scrubbed from log text.

    mask({"HF_TOKEN": "hf_...", "TP": "2"}) -> {"HF_TOKEN": "***", "TP": "2"}
    scrub("login with hf_...") -> "login with ***"

A secret is known by the name of its variable or by its own shape. In doubt a value is masked: a hidden path costs
nothing, a published token does.
"""

import json
import re
from collections.abc import Iterable, Mapping

MASK = "***"
SHORTEST_SCRUBBED = 6  # characters; words like "true" or "1" under a secret's name must not be cut out of a log

_NAME = re.compile(r"TOKEN$|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(?:hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{20,}"  # OpenAI and its like
    r"|nvapi-[A-Za-z0-9_-]{20,}"  # NVIDIA
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"  # GitHub
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password@ in an address
)


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable must not be written down."""
    return bool(_NAME.search(name) or _SHAPE.search(value))


def mask(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, fit to be written: secret values replaced."""
    return {name: MASK if is_secret(name, value) else value for name, value in environment.items()}


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """What to scrub besides shapes: each line of a secret value, as it is and as Python or JSON prints it."""
    lines = (line for name, value in environment.items() if is_secret(name, value) for line in value.splitlines())
    forms = {form for line in lines for form in (line, repr(line)[1:-1], json.dumps(line)[1:-1])}
    return sorted((form for form in forms if len(form) >= SHORTEST_SCRUBBED), key=len, reverse=True)


def scrub(text: str, values: Iterable[str] = ()) -> str:
    """Text without secrets: those given, longest first, and all that have a secret's shape."""
    for value in values:
        text = text.replace(value, MASK)
    return _SHAPE.sub(MASK, text)
