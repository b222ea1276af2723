"""Convert between plain data (parsed JSON and YAML) and frozen dataclasses.

    build(Parallel, {"tp": 2, "pp": 1}, where="recipe row 3") -> Parallel(tp=2, ...)

Recipes, overrides and config.json share this validation: an unknown name lists the valid ones, a wrong type is reported
with its path. It is hand-written because engines must read config.json without extra packages, and because importing a
validation library would take longer than all of `llmb-run list`.
"""

import errno
import json
import math
import operator
import os
import stat
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from llmb.errors import ConfigError, LaunchError, UnknownName

T = TypeVar("T")
SCALARS = {str, int, float, bool, type(None)}
LARGE_JSON_BYTES = 2**26  # of larger files holes are looked for: their zeros would be read and decoded
MAX_JSON_BYTES = 2**30
MAX_PARSED_BYTES = 2**29  # the result of a million steps takes a sixteenth
_scan_json = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

# Dataclass -> {name in older files: current name}. Whatever reads a stored file goes through `current_names`.
RENAMED_FIELDS: dict[str, dict[str, str]] = {
    "Training": {"fast_sums": "fp8_fast_accum", "keep_inputs": "save_norm_outputs", "masters": "master_weights"},
    "Precision": {"fp8_scaling": "fp8_recipe"},
    "Model": {"attention_cap": "attn_logit_softcap", "latent": "mla"},
    "Prediction": {"home_slots": "host_slots"},
    "Result": {"guilty_rank": "failed_rank", "mean_in_flight": "mean_concurrency"},
    "RunEnded": {"guilty_rank": "failed_rank"},
    "Submission": {"wishes": "sbatch_overrides"},
    "JobOutcome": {"guilty_nodes": "excluded_nodes"},
    "RequestDone": {"answer_crc": "output_crc"},
}
# Old name of a field -> {value in older files: current value}.
RENAMED_VALUES: dict[str, dict[Any, str]] = {
    "fp8_scaling": {
        "delayed": "tensorwise_delayed", "current": "tensorwise_current",
        "tensor": "tensorwise", "channel": "channelwise", "block": "blockwise",
    },
}  # fmt: skip
# Dataclass -> {field that is a plain mapping: dataclass whose fields are its keys}.
MAPPINGS = {"Result": {"number_formats": "Precision"}}


def current_names(cls_name: str, data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass as a file stores them, under their current names and with current values.

    Keys may carry a prefix ("model.mla"). An old name next to the current one is left for the caller to refuse.
    """
    if cls_name not in RENAMED_FIELDS and cls_name not in MAPPINGS:
        return data
    for name, inner in MAPPINGS.get(cls_name, {}).items():
        if isinstance(data.get(name), dict):
            data = data | {name: current_names(inner, data[name])}
    renamed = {prefix + old: prefix + new for old, new in RENAMED_FIELDS.get(cls_name, {}).items()}
    if renamed.keys().isdisjoint(data):
        return data
    return dict(
        (key, value) if renamed.get(key) in data else (renamed.get(key, key), _current_value(key, value))
        for key, value in data.items()
    )


def _current_value(old_name: str, value: Any) -> Any:
    return RENAMED_VALUES.get(old_name, {}).get(value, value) if isinstance(value, str) else value


def build(cls: type[T], data: Any, where: str = "") -> T:
    """Build a dataclass from plain data, checking every name and type."""
    path = where or cls.__name__
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of fields, got {_show(data)}")
    data = current_names(cls.__name__, data)
    dataclass_fields = _fields_of(cls)  # type: ignore[arg-type]
    if not data.keys() <= dataclass_fields.keys():
        name = next(name for name in data if name not in dataclass_fields)
        raise UnknownName(f"field in {path}:", name, dataclass_fields)
    values = {}  # by the dataclass's own name objects: keyword arguments are matched by identity first
    for name, field in dataclass_fields.items():
        if name in data:
            value = data[name]
            is_plain = type(value) in field.plain_types or (type(value) is str and value in field.literals)
            values[name] = value if is_plain else convert(field.kind, value, f"{path}.{name}")
        elif field.required:
            raise ConfigError(f"{path}: field {name!r} is missing")
    return cls(**values)


class _Field(NamedTuple):
    """Field of a dataclass as `build` needs it: in ten thousand runs nearly all values need no conversion."""

    kind: Any
    plain_types: frozenset[type]  # of values that need none
    literals: frozenset[str]  # texts that need none
    required: bool


@cache
def _fields_of(cls: Any) -> dict[str, _Field]:
    kinds = field_types(cls)
    return {
        field.name: _Field(
            kinds[field.name],
            _plain_types(kinds[field.name]),
            _literals(kinds[field.name]),
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(cls)
    }


def _plain_types(kind: Any) -> frozenset[type]:
    plain = {choice for choice in _choices(kind) if choice in (str, int, float, bool, type(None))}
    return frozenset(plain - {int} if float in plain else plain)  # a whole number is converted to the other kind


def _literals(kind: Any) -> frozenset[str]:
    literals = (_origin_and_args(choice) for choice in _choices(kind))
    texts = (args for origin, args in literals if origin is typing.Literal)
    return frozenset(text for group in texts for text in group if type(text) is str)


def _choices(kind: Any) -> tuple[Any, ...]:
    origin, args = _origin_and_args(kind)
    return args if origin in (typing.Union, types.UnionType) else (kind,)


@cache
def field_types(cls: Any) -> dict[str, Any]:
    """Return the field types of a dataclass."""
    return typing.get_type_hints(cls)


def convert(kind: Any, value: Any, where: str) -> Any:
    """Convert a value to the type `kind`; a ConfigError names its path and the expected type."""
    if kind is Any or type(value) is kind:
        return value
    if type(kind) is type and is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value, where)
    origin, args = _origin_and_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is typing.Literal:
        if type(value) in {type(a) for a in args} and value in args:
            return value
        raise UnknownName(f"value for {where}:", value, args)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {_show(value)}")
        item_kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(item_kinds) != len(value):
            raise ConfigError(f"{where}: expected {len(args)} values, got {len(value)}")
        if all(map(operator.is_, map(type, value), item_kinds)):
            return tuple(value)
        return tuple(convert(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(item_kinds, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected a mapping, got {_show(value)}")
        return {convert(args[0], k, where): convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if kind is float and type(value) in (int, float):
        try:
            return float(value)
        except OverflowError as error:  # an int of more than 308 digits
            raise ConfigError(f"{where}: {_show(value)} is too large") from error
    raise ConfigError(f"{where}: expected {_name(kind)}, got {_show(value)}")


@cache
def _origin_and_args(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _convert_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    if (
        isinstance(value, dict) and len(choices) > 1 and all(map(is_dataclass, choices))
    ):  # a union of dataclasses, distinguished by their `kind` field
        by_kind = {typing.get_args(field_types(c)["kind"])[0]: c for c in choices}
        if not isinstance(value.get("kind"), str) or value["kind"] not in by_kind:
            raise UnknownName(f"kind of {where}:", value.get("kind"), by_kind)
        return build(by_kind[value["kind"]], value, where)
    if len(choices) == 1:
        return convert(choices[0], value, where)
    for choice in choices:
        try:
            return convert(choice, value, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where}: expected {' or '.join(map(_name, choices))}, got {_show(value)}")


def whole_number(text: str) -> int | None:
    """Parse a whole number of ASCII digits, at most 18 of them; None where it is not one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _name(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def to_plain(value: Any) -> Any:
    """Return a dataclass as plain data, fields in declaration order; numbers are not copied one by one."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = value if {*map(type, value)} <= SCALARS else map(_plain, value)
        return type(value)(items)
    return to_plain(value)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return valid JSON: NaN and infinity, which JSON cannot represent, become null."""
    return json.dumps(_plain_and_finite(value), indent=indent, allow_nan=False)


def _plain_and_finite(value: Any) -> Any:
    """Return dataclasses as mappings, as `to_plain` does, but without copying each of a million numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain_and_finite(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain_and_finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        are_finite = {*map(type, value)} == {float} and math.isfinite(sum(value))
        return list(value) if are_finite else [_plain_and_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def open_regular_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading; a FIFO or a device under its name, which could block for ever, is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):  # open() refuses a folder
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb", buffering=buffering)


def read_json(path: Path) -> Any:
    """Parse a JSON file; a ConfigError says why it cannot be read."""
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise ConfigError(f"cannot read {path}: {size:,} bytes are more than the {MAX_JSON_BYTES:,} allowed")
            if size > LARGE_JSON_BYTES and (hole := os.lseek(file.fileno(), 0, os.SEEK_HOLE)) < size:
                raise ConfigError(f"{path} is not valid JSON: nothing is stored from byte {hole:,} on")
            file.seek(0)
            content = file.read()
            text = str(content, json.detect_encoding(content))
            check_parsed_size(text)
            return parse_json(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def check_parsed_size(text: str) -> None:
    """Raise a ValueError for JSON that takes too much memory once it is parsed: `[],` of three bytes takes 64."""
    if len(text) < MAX_PARSED_BYTES >> 7:
        return  # no text takes more than that many times its size
    containers = text.count("[") + text.count("{") + text.count(":")
    parsed = 32 * text.count(",") + 128 * containers + 32 * text.count('"')
    if parsed > MAX_PARSED_BYTES:
        raise ValueError(f"parsed it takes about {parsed:,} bytes of memory; at most {MAX_PARSED_BYTES:,} are allowed")


def parse_json(text: str) -> Any:
    """Return what json.loads does, or raise a ValueError: also for what is nested too deeply, and for halves of a
    surrogate pair, which no file, store or terminal takes."""
    try:
        return with_whole_characters(json.loads(text), text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_json_line(line: str | bytes) -> Any:
    """Parse a line as json.loads does, which takes half as long again: it guesses an encoding, looks for white space.

    Raise a ValueError like `parse_json`, but let a RecursionError pass.
    """
    text = (line if isinstance(line, str) else str(line, "utf-8")).strip()
    check_parsed_size(text)
    try:
        data, end = _scan_json(text, 0)
    except StopIteration as error:
        raise ValueError(text) from error
    if end != len(text):
        raise ValueError(text)
    return with_whole_characters(data, text)


def with_whole_characters(data: T, text: str) -> T:
    """Return parsed JSON; raise a ValueError if its text spells half of a surrogate pair.

    Bytes of paths that are not UTF-8 are written as U+DC80 to U+DCFF, and may be read back.
    """
    if "\\" in text and ("\\ud" in text or "\\uD" in text):  # one character is found ten times as fast
        json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogateescape")
    return data


def temporary_path(path: Path) -> Path:
    """Return the path of a hidden temporary file beside this one, with a name that nobody can guess."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}")


def create_new(path: Path, mode: int = 0o666) -> int:
    """Create a file and return its descriptor, open for reading and writing; one that exists, or a link, is an OSError.

    Whoever else can write to the folder could otherwise plant a link there, through which we overwrite another file.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_atomic(path: Path, text: str, mode: int = 0o666, *, durable: bool = False) -> None:
    """Write to a temporary file and rename it: readers see the old file or the new one, never half of one.

    `mode`: of the new file, less the umask. `durable`: on disk before it is renamed, even if the machine fails.
    """
    temporary = temporary_path(path)
    try:
        with open(create_new(temporary, mode), "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LaunchError(f"cannot write {path}: {error.strerror}") from error
