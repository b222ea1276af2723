"""YAML files of users, which may be damaged or malicious: bounded in bytes, depth, values and digits.

    load_yaml(Path("runs.yaml"), "sections named like pretrain_llama3.1_8b")

Aliases and merge keys (`<<`) let a file of a few hundred bytes stand for billions of values: both are counted before
they are expanded.
"""

from math import inf
from pathlib import Path
from typing import Any

from llmb.config.serialization import open_regular_file
from llmb.errors import ConfigError

MOST_BYTES = 2**24
MOST_DEPTH = 1000
MOST_VALUES = 1_000_000  # after aliases are expanded; a bulk file of 10,000 runs has a tenth
MOST_BITS = 1024  # of a whole number: what a float holds, and Python prints


def load_yaml(path: Path, expected: str, loader: Any = None) -> Any:
    """Parse a YAML file; errors name the file, the line and the problem, or what was expected in an empty file."""
    return parse_yaml(path, text_content(path), expected, loader)


def text_content(path: Path) -> bytes:
    """Return the content of a text file of a user; more than a YAML file may have is refused."""
    try:
        with open_regular_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES:,} bytes")
    return content


def parse_yaml(path: Path, content: bytes, expected: str, loader: Any = None) -> Any:
    """Parse the content of a YAML file at this path."""
    import yaml

    loader = loader or getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if _may_be_deep(content) and _is_deep(content, loader):
            raise ConfigError(f"nested more than {MOST_DEPTH} levels deep")
        data = yaml.load(content, Loader=_bounded(loader))
        if _expanded_size(data, {}) > MOST_VALUES:
            raise ConfigError(f"its aliases expand to more than {MOST_VALUES:,} values")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:  # an impossible date
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except LookupError as error:  # `!!bool 3`, `!!int ""`
        raise ConfigError(f"{path}: not valid YAML: a value is not of the type that its tag names") from error
    if data is None:
        raise ConfigError(f"{path} is empty; expected {expected}")
    return data


def _bounded(loader: Any) -> Any:
    """Return a loader that refuses merge keys which add too many values."""
    import yaml

    class BoundedLoader(loader):
        merged_values = 0

        def flatten_mapping(self, node: Any) -> None:
            for key, merged in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    parts = merged.value if isinstance(merged, yaml.SequenceNode) else [merged]
                    for part in parts:
                        if isinstance(part, yaml.MappingNode):
                            self.flatten_mapping(part)
                            self.merged_values += len(part.value)
            if self.merged_values > MOST_VALUES:
                raise ConfigError(f"its merge keys expand to more than {MOST_VALUES:,} values")
            super().flatten_mapping(node)

    return BoundedLoader


def _may_be_deep(content: bytes) -> bool:
    """Return whether the depth of a YAML file needs a look.

    A level opens a bracket or has a column of its own, which a sequence in a mapping may share.
    """
    brackets = content.count(b"[") + content.count(b"{")
    return brackets > MOST_DEPTH or 2 * max(map(len, content.splitlines()), default=0) > MOST_DEPTH


def _is_deep(content: bytes, loader: Any) -> bool:
    """Return whether a YAML file has more levels than are loaded: the C parser crashes where its stack ends."""
    import yaml

    depth = 0
    for event in yaml.parse(content, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_DEPTH:
                return True
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return False


def _expanded_size(value: Any, sizes: dict[int, float]) -> float:
    """Count the values that a reader meets: an alias counts as often as it is used, one to itself for ever.

    A number that no float holds is refused on the way.
    """
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ConfigError(f"a whole number of more than {MOST_BITS} bits")
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = inf
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_expanded_size(item, sizes) for item in items)
    return sizes[id(value)]
