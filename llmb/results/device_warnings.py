"""Warnings about the devices of a run, as they were when it started: power limit, throttling, PCIe, unequal GPUs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields

from llmb.events import Event, RunStarted
from llmb.formats.device_facts import DeviceFacts, power_limit_text, recorded_facts
from llmb.results.recorded_events import events_of

# Reasons for lower clocks that a healthy GPU does not show; the power limit alone is shown by every one under load.
SLOWDOWNS = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "sync_boost"}
COMPARED = ("driver", "power_limit_w", "sm_clock_max_mhz", "sm_clock_applied_mhz", "ecc", "pcie_width", "governor")
MOST_RANKS = 8  # named in a warning

Rank = tuple[RunStarted, DeviceFacts]


def device_cautions(events: Iterable[Event]) -> Iterator[tuple[str, str]]:
    """Yield code and text of each warning."""
    ranks = [(event, recorded_facts(event.device)) for event in events_of(events, RunStarted)]
    yield from _grouped(
        "POWER_LIMIT", ranks, power_limit_text,
        "compare it only with runs at this limit, or restore it: sudo nvidia-smi -pl WATTS",
    )  # fmt: skip
    yield from _grouped("THROTTLED", ranks, _slowdowns, "look at cooling and power supply: llmb-run doctor")
    yield from _grouped("PCIE_NARROW", ranks, _narrow, "copies between host and GPU are slow: llmb-run doctor")
    yield from _unequal(ranks)


def _slowdowns(facts: DeviceFacts) -> str | None:
    reasons = [reason for reason in facts.throttling if reason in SLOWDOWNS]
    heat = "" if facts.temperature_c is None else f" at {facts.temperature_c:.0f} C"
    return f"slowed down when it started, by {', '.join(reasons)}{heat}" if reasons else None


def _narrow(facts: DeviceFacts) -> str | None:
    width, most = facts.pcie_width, facts.pcie_width_max
    return f"PCIe x{width} of x{most}" if width is not None and most is not None and width < most else None


def _grouped(
    code: str, ranks: Sequence[Rank], describe: Callable[[DeviceFacts], str | None], remedy: str
) -> Iterator[tuple[str, str]]:
    """Yield one warning for ranks with the same text."""
    texts: dict[str, list[RunStarted]] = {}
    for event, facts in ranks:
        if text := describe(facts):
            texts.setdefault(text, []).append(event)
    for text, events in texts.items():
        where = "" if len(events) == len(ranks) else f" on {_names(events)}"
        yield code, f"{text}{where}; {remedy}"


def _unequal(ranks: Sequence[Rank]) -> Iterator[tuple[str, str]]:
    """Yield the facts in which some ranks differ from most."""
    differences = []
    for name in (field.name for field in fields(DeviceFacts) if field.name in COMPARED):
        values = [getattr(facts, name) for _, facts in ranks]
        (usual, _), *others = Counter(values).most_common() or [(None, 0)]
        if others:
            odd = [event for (event, _), value in zip(ranks, values, strict=True) if value != usual]
            value = next(value for value in values if value != usual)
            differences.append(f"{name} {value} on {_names(odd)}, {usual} elsewhere")
    if differences:
        yield "UNEQUAL_GPUS", f"ranks differ: {'; '.join(differences)}; the slowest sets the pace: llmb-run doctor"


def _names(events: Sequence[RunStarted]) -> str:
    names = [f"rank {event.rank}" + (f" ({event.host})" if event.host else "") for event in events[:MOST_RANKS]]
    return ", ".join(names) + (f" and {len(events) - MOST_RANKS} more" if len(events) > MOST_RANKS else "")
