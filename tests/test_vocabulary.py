"""Identifiers use the words of the field (docs/glossary.md lists what is our own), so that a reader who greps finds."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Words that once stood for something the field has a name for, and that name.
REPLACED = {
    "slope": "grad", "slopes": "grads", "dstream": "d_residual", "gauge": "scale and amax", "gauges": "scale and amax",
    "rows8": "per_token", "groups8": "1x128", "blocks8": "128x128", "visits": "routed tokens", "dealt": "permuted",
    "squeezed": "softcap", "capped": "softcap", "halved": "split master weights", "rehearsal": "dry run",
    "rehearse": "dry run", "rehearsed": "dry run", "leash": "supervisor", "steward": "job runner",
    "whereabouts": "hang report", "thirst": "power-limited slowdown", "guilty": "failed", "wishes": "overrides",
    "wish": "override", "standin": "proxy", "standins": "proxies", "lane": "stream or track", "lanes": "streams",
    "stretch": "interval", "stretches": "intervals", "outlook": "admission", "journal": "recorder",
    "travelling": "pending transfer", "seat": "data-parallel shard", "seal": "checksum", "sealed": "checksummed",
    "turned": "rotated (RoPE)",
}  # fmt: skip
# Participles and function words that say nothing of what a name holds.
EMPTY = {
    "found", "made", "wanted", "kept", "said", "told", "asked", "given", "shown", "known", "one",
    "own", "there", "rest", "fresh", "onto", "ours", "theirs", "what", "who", "again",
}  # fmt: skip
CLAUSE = re.compile(r'^ *"""(What|Of|As|How|Who|Where) .*', re.MULTILINE)  # neither noun phrase nor imperative
FILES = [path for folder in ("llmb", "tests", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that this file introduces: definitions, parameters, assigned names and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words(name: str) -> list[str]:
    """A name in snake or camel case, as lower-case words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


@pytest.mark.parametrize("folder", ["llmb", "tests", "bench"])
def test_identifiers_use_the_words_of_the_field(folder):
    refused = []
    for path in FILES:
        relative = path.relative_to(ROOT)
        if relative.parts[0] != folder:
            continue
        for name, line in identifiers(ast.parse(path.read_text())):
            if name.lstrip("_") in EMPTY:
                refused.append(f"{relative}:{line} {name}: name what it holds")
            refused += [f"{relative}:{line} {name}: {REPLACED[word]}" for word in words(name) if word in REPLACED]
    assert not refused, "\n".join(sorted(set(refused)))


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative():
    package = [path for path in FILES if path.is_relative_to(ROOT / "llmb")]
    assert [f"{path}: {line[0]}" for path in package for line in CLAUSE.finditer(path.read_text())] == []
