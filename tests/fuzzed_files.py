"""Seeded mutations of valid files: bytes are damaged as a disk or a transfer would, values as a user or an attacker."""

import json
import random
from copy import deepcopy
from typing import Any

INSERTED = [
    b"\r",
    b"\n",
    b"\x00",
    b"\x1b[31m",
    b"\xff\xfe",
    b"!!bool 3",
    b"1e999",
    b"-",
    b"0x" + b"f" * 5000,
    b"{",
    b"[",
    b"&a",
    b"*a",
    b": ",
]
VALUES: list[Any] = [
    None, True, 0, -1, 1, 7, 2**31, 10**400, 10**30, 0.0, -0.5, 1e-300, 1e300, "", "7", "²", "x" * 10_000, "\x1b[2J",
    "GPUs*0", "GPUs/²", "8-4", "8-99999999999999999999", [], {}, [[]], [None], [0], {"": 0}, {"kind": "load"}, [1, "a"],
]  # fmt: skip


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """Flip, cut, duplicate or insert bytes."""
    data = bytearray(content)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(data) + 1)
        kind = chance.randrange(4)
        if kind == 0 and data:
            for _ in range(chance.randrange(1, 20)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif kind == 1:
            del data[place : place + chance.choice([1, 10, 100, len(data)])]
        elif kind == 2:
            start = chance.randrange(len(data) + 1)
            data[place:place] = data[start : start + chance.randrange(1, 500)]
        else:
            data[place:place] = chance.choice(INSERTED)
    return bytes(data)


def mutated_value(value: Any, chance: random.Random) -> Any:
    """Return a copy with one to three values anywhere inside replaced, removed, renamed or exchanged."""
    value = deepcopy(value)
    for _ in range(chance.randrange(1, 4)):
        holders = [holder for holder in _holders(value) if holder]
        if not holders:
            return chance.choice(VALUES)
        holder = chance.choice(holders)
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key, other = chance.choice(keys), chance.choice(keys)
        kind = chance.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[chance.choice(["tpp", "", "kind", other])] = holder.pop(key)
        elif kind == 2:
            holder[key], holder[other] = holder[other], holder[key]
        elif kind == 3 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = chance.choice([-holder[key], holder[key] + 1, holder[key] * 3, _half(holder[key]), 0])
        else:
            holder[key] = deepcopy(chance.choice(VALUES))
    return value


def _half(number: float) -> float:
    return number / 2 if abs(number) < 1e300 else number


def _holders(value: Any) -> list[Any]:
    """Return every mapping and list inside a value."""
    holders, waiting = [], [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            holders.append(item)
            waiting += item.values() if isinstance(item, dict) else item
    return holders


def mutated_json(value: Any, chance: random.Random) -> bytes:
    """Return JSON text of a mutated value, one time in three with damaged bytes instead."""
    if chance.random() < 1 / 3:
        return damaged_bytes(json.dumps(value).encode(), chance)
    return json.dumps(mutated_value(value, chance)).encode()


def mutated_lines(values: list[Any], chance: random.Random) -> bytes:
    """Return lines of JSON of which some are mutated, now and then with one that is nested too deeply."""
    lines = [mutated_json(value, chance) if chance.random() < 0.5 else json.dumps(value).encode() for value in values]
    if chance.random() < 0.02:
        lines.insert(chance.randrange(len(lines) + 1), b"[" * 100_000)
    return b"\n".join(lines)
