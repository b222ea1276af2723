"""Ceilings of a run's page: what `llmb-run probe` measured on the machine, beside what the run reached."""

from collections.abc import Iterator

from llmb.perfmodel.probe.node_collectives import NodeCollectives
from llmb.perfmodel.probe.probe_record import ProbeRecord
from llmb.report.machine.probe_text import size_text, spread_rows
from llmb.report.page.html_blocks import section, table
from llmb.report.page.run_record import RunRecord
from llmb.report.plan_text import RATES
from llmb.report.table import number
from llmb.results.result import Result

HEADER = ("measured", "median", "p5 to p95", "unit", "n")


def ceilings(record: RunRecord) -> str:
    """Return the section; empty where the machine was not measured.

    The figures are those of the result. The probe's file adds spreads, unless it was written again since the run.
    """
    ceiling, probe, among_nodes = record.result.measured_ceiling, record.probe, record.node_collectives
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    if probe is not None and (ceiling is None or ceiling.tflops in (probe.rates.matmul_tflops, probe.rates.fp8_tflops)):
        rows += spread_rows(probe.details) if probe.details is not None else _plain_rows(probe)
        notes += [f"By llmb-run probe, {probe.rates.source}.", _reached(record.result), _largest_all_reduce(probe)]
    elif ceiling is not None:
        rows += [
            (f"{ceiling.dtype} GEMMs", number(ceiling.tflops), "", "TFLOP/s", ""),
            ("memory", number(ceiling.memory_gbs), "", "GB/s", ""),
        ]
        notes += [f"By llmb-run probe, {ceiling.source}.", _reached(record.result)]
    if among_nodes is not None:
        rows += _node_rows(among_nodes)
        notes += [f"Collectives on {', '.join(among_nodes.nodes)}: {among_nodes.measured_at}."]
    if not rows:
        return ""
    note = " ".join(filter(None, notes))
    return section("ceilings", "Ceilings measured by probe", table("ceilings-table", HEADER, rows), note)


def _node_rows(among_nodes: NodeCollectives) -> Iterator[tuple[str, ...]]:
    """Yield the bus bandwidth of each collective at its largest size; the slowest calls have the lowest."""
    measured = among_nodes.collectives
    for rate in among_nodes.largest:
        low, high = (rate.busbw_gbs * rate.seconds.median / seconds for seconds in (rate.seconds.p95, rate.seconds.p5))
        ranks = f"{measured.ranks} ranks on {measured.nodes} nodes, {measured.backend}"
        title = f"{rate.operation.replace('_', '-')} of {size_text(rate.bytes)}, {ranks}"
        yield title, number(rate.busbw_gbs), f"{number(low)} to {number(high)}", "GB/s bus", str(rate.seconds.n)


def _plain_rows(probe: ProbeRecord) -> Iterator[tuple[str, ...]]:
    """Yield the rates of a file without spreads."""
    for name, (title, unit) in RATES.items():
        value = getattr(probe.rates, name)
        if value is not None:
            yield title, number(value), "", unit, ""


def _reached(result: Result) -> str:
    """Return the run's own rate against the ceiling of its dtype; nothing where it is unknown."""
    ceiling = result.measured_ceiling
    if ceiling is None or ceiling.fraction is None or result.tflops_per_gpu is None:
        return ""
    return (
        f"The run computes {number(result.tflops_per_gpu)} TFLOP/s per GPU, "
        f"{100 * ceiling.fraction:.0f} % of what {ceiling.dtype} GEMMs sustain there."
    )


def _largest_all_reduce(probe: ProbeRecord) -> str:
    collectives = probe.details.collectives if probe.details is not None else None
    rates = [rate for rate in collectives.rates if rate.operation == "all_reduce"] if collectives is not None else []
    if collectives is None or not rates:
        return ""
    largest = max(rates, key=lambda rate: rate.bytes)
    return (
        f"An all-reduce of {size_text(largest.bytes)} among {collectives.ranks} ranks has a bus bandwidth of "
        f"{number(largest.busbw_gbs)} GB/s."
    )
