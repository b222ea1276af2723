"""Text of a probe: every figure with its spread, and collectives by size."""

from collections.abc import Iterator

from llmb.perfmodel.probe.probe_record import Collectives, ProbeDetails, ProbeRecord, Spread
from llmb.report.plan_text import DISK_RATES, RATES, describe_rates
from llmb.report.table import number, render

HEADER = ("measured", "median", "p5 to p95", "unit", "n")
Row = tuple[str, str, str, str, str]


def describe_probe(record: ProbeRecord) -> str:
    """Return the tables that `llmb-run probe` prints."""
    details = record.details
    if details is None:
        from dataclasses import asdict

        return describe_rates(asdict(record.rates))
    blocks = [f"{render(HEADER, list(spread_rows(details)))}\n({record.rates.source})"]
    if details.collectives is not None:
        blocks.append(describe_collectives(details.collectives))
    return "\n\n".join(blocks)


def spread_rows(details: ProbeDetails) -> Iterator[Row]:
    """Yield a row for each figure of a machine."""
    for name, spread in details.rates.items():
        title, unit = (RATES | DISK_RATES).get(name, (name, ""))
        yield _row(title, spread, unit)
    for dtype, spread in details.gemm_tflops.items():
        yield _row(f"gemms of {details.model or 'the model'}, {dtype}", spread, "TFLOP/s")
    if details.launch_us is not None:
        yield _row("launch of a small kernel, back to back", details.launch_us, "us")
    if details.launch_and_wait_us is not None:
        yield _row("launch of one, and wait for it", details.launch_and_wait_us, "us")
    if details.host_memory_gbs is not None:
        yield _row("host memory, read and written", details.host_memory_gbs, "GB/s")


def describe_collectives(collectives: Collectives) -> str:
    """Return the table of collectives; bandwidths are those of NCCL-tests."""
    header = ("collective", "size", "time", "p5 to p95", "unit", "algbw GB/s", "busbw GB/s")
    rows = [
        (
            rate.operation.replace("_", "-"),
            size_text(rate.bytes),
            number(1e6 * rate.seconds.median),
            f"{number(1e6 * rate.seconds.p5)} to {number(1e6 * rate.seconds.p95)}",
            "us",
            number(rate.algbw_gbs),
            number(rate.busbw_gbs),
        )
        for rate in collectives.rates
    ]
    nodes = f" on {collectives.nodes} nodes" if collectives.nodes > 1 else ""
    return f"{render(header, rows)}\n({collectives.ranks} ranks{nodes}, {collectives.backend})"


def size_text(size: int) -> str:
    """Return a size in its largest whole unit."""
    for unit, width in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >> width:
            return f"{size / (1 << width):.4g} {unit}"
    return f"{size} B"


def _row(title: str, spread: Spread, unit: str) -> Row:
    return title, number(spread.median), f"{number(spread.p5)} to {number(spread.p95)}", unit, str(spread.n)
