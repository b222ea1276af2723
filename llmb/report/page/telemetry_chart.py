"""Chart of power and clocks over time; of several GPUs the median, in a band from the lowest to the highest."""

from collections.abc import Sequence

from llmb.events import GpuSample, RunStarted
from llmb.report.page.page_chart import Chart, Trace, axis, horizontal_line, shaded, thinned_series
from llmb.report.page.run_record import RunRecord
from llmb.report.page.thinning import BINS, MOST_POINTS, thin
from llmb.report.table import number
from llmb.results.gpu_telemetry import Interval


def telemetry_chart(record: RunRecord, interval: Interval | None = None) -> Chart | None:
    """Return the chart of all samples, with the measured steps shaded, or of those that are marked as measured."""
    samples = [s for s in record.of_type(GpuSample) if s.measured is not False]
    samples.sort(key=lambda sample: sample.time)
    powers = [(s.time, s.power_w) for s in samples if s.power_w is not None]
    clocks = [(s.time, s.sm_clock_mhz) for s in samples if s.sm_clock_mhz is not None]
    if not powers and not clocks:
        return None
    gpus = len({s.rank for s in samples})
    started = next((e.time for e in record.of_type(RunStarted)), samples[0].time)
    start = samples[0].time if interval is None else started
    traces = _traces("power", powers, start, gpus, 0, "%{y:.4g} W")
    traces += [trace | {"yaxis": "y2"} for trace in _traces("SM clock", clocks, start, gpus, 1, "%{y:,.0f} MHz")]
    shapes, notes = [] if interval is None else [shaded(interval[0] - start, interval[1] - start)], []
    telemetry = record.result.telemetry
    if telemetry is not None and telemetry.power_limit_w is not None:
        limit = telemetry.power_limit_w
        shape, note = horizontal_line(limit, f"power limit {number(limit)} W", "dot", left=True)
        shapes.append(shape)
        notes.append(note)
    layout = {
        "xaxis": axis("s since the start"), "yaxis": axis("W", rangemode="tozero"),
        "yaxis2": axis("MHz", overlaying="y", side="right", rangemode="tozero", showgrid=False),
        "shapes": shapes, "annotations": notes, "legend": {"y": -0.3},
    }  # fmt: skip
    return Chart(
        name="power-clocks", title="Power and clocks over time", traces=traces, layout=layout, whole=True,
        captions=_captions(record, samples, gpus),
    )  # fmt: skip


def _traces(
    name: str, points: Sequence[tuple[float, float]], start: float, gpus: int, index: int, hover: str
) -> list[Trace]:
    if not points:
        return []
    most, bins = (MOST_POINTS, BINS) if gpus == 1 else (0, max(1, min(BINS, len(points) // gpus)))
    thinned = thin([time - start for time, _ in points], [value for _, value in points], most, bins)
    return thinned_series(name, thinned, index, hover, dashed=True)


def _captions(record: RunRecord, samples: Sequence[GpuSample], gpus: int) -> list[str]:
    sampled_gpus = "one GPU" if gpus == 1 else f"{gpus} GPUs: the line is their median, the band their range"
    captions = [f"{len(samples):,} samples of {sampled_gpus}."]
    telemetry = record.result.telemetry
    if telemetry is None:
        return captions
    if telemetry.throttle_reasons:
        reasons = ", ".join(f"{reason} in {100 * part:.0f} %" for reason, part in telemetry.throttle_reasons.items())
        captions.append(f"Over the measured interval clocks were kept down by: {reasons} of the samples.")
    else:
        captions.append("Nothing kept the clocks down over the measured interval.")
    if telemetry.temperature_c is not None:
        captions.append(
            "Temperature: {p50:.0f} °C, 5 % of samples above {p95:.0f} °C.".format(**telemetry.temperature_c)
        )
    return captions
