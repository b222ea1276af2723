"""Checks of values of parsed JSON, made from the annotation of the field that takes them.

    check, nullable = conversion(int | None)
    check(7) -> 7;  check("7") raises a TypeError

Files of a run may be damaged or hostile: a value of another type is refused, never converted by guess.
"""

from collections.abc import Callable, Sequence
from math import hypot, isnan
from types import NoneType
from typing import Any, Literal, get_args, get_origin

Check = Callable[[Any], Any]  # returns the value converted, or raises
LARGEST_NUMBER = 2.0**63  # of any time, count or byte; infinity, NaN and numbers that no float holds are refused


def conversion(annotation: Any) -> tuple[Check, bool]:
    """Return a function that checks a value of parsed JSON, and raises a ValueError or a TypeError; and if null is one.

    Values inside of lists and mappings are checked alike.
    """
    if get_origin(annotation) is Literal:
        return _literal(frozenset(get_args(annotation))), False
    choices = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    (required,) = (choice for choice in choices if choice is not NoneType)
    checks = {int: _count, float: _number, str: _text, bool: _flag, Any: _unchecked}
    convert: Check = checks.get(required, _fail)
    if get_origin(required) in (tuple, Sequence):
        inner = get_args(required)[0]
        convert = _numbers if inner in (int, float) else _sequence(_value_check(inner))
    elif get_origin(required) is dict:
        convert = _mapping(_value_check(get_args(required)[1]))
    return convert, NoneType in choices or required is Any


def _value_check(annotation: Any) -> Check:
    convert, nullable = conversion(annotation)
    return _optional(convert) if nullable else convert


def _unchecked(value: Any) -> Any:
    """Return a value whose reader checks it (`formats.device_facts.recorded_facts`)."""
    return value


def _fail(value: Any) -> Any:
    raise TypeError(f"no field has the type {type(value).__name__}")


def _optional(convert: Check) -> Check:
    return lambda value: None if value is None else convert(value)


def _literal(choices: frozenset[Any]) -> Check:
    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(value)
        return value

    return check


def _sequence(convert: Check) -> Check:
    return lambda value: tuple(map(convert, _typed(value, list)))


def _mapping(convert: Check) -> Check:
    return lambda value: {k: convert(v) for k, v in _typed(value, dict).items()}


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(value)
    return value


def _flag(value: Any) -> bool:
    return bool(_typed(value, bool))


def _text(value: Any) -> str:
    return str(_typed(value, str))


def _count(value: Any) -> int:
    if type(value) is not int or not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        raise TypeError(value)
    return float(value) if type(value) is int else value


def _numbers(value: Any) -> tuple[float, ...]:
    """Check the time of every token: the longest list of an event, so that it is not checked one by one."""
    if not {*map(type, _typed(value, list))} <= {int, float}:
        raise TypeError(value)
    if value:
        check_range(value)
    return tuple(value)


def check_range(values: Sequence[float]) -> None:
    """Raise a ValueError if one of these numbers, ints and floats, is too large or not finite."""
    try:
        # One call instead of three for nearly all lines, of which there are millions.
        if hypot(*values) < LARGEST_NUMBER:
            return
    except OverflowError as error:  # an int that no float holds
        raise ValueError(values) from error
    if not (min(values) > -LARGEST_NUMBER and max(values) < LARGEST_NUMBER) or isnan(sum(values)):
        raise ValueError(values)


# Check -> types of plain values that it returns as they are, numbers if they are in range.
PLAIN_CHECKS: dict[Check, tuple[type, ...]] = {_count: (int,), _number: (float,), _text: (str,), _flag: (bool,)}
