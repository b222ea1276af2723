"""Text of an explanation: verdict, limits, likely causes, prediction, published results, terms."""

from llmb.perfmodel.explain.explanation import Expected, Explanation
from llmb.report.table import number, render

MOST_PUBLISHED = 6
METRICS = {
    "step_time_s": ("step time", "s"),
    "output_tokens_per_s": ("output", "tokens/s"),
    "ttft_ms": ("TTFT", "ms"),
    "tpot_ms": ("TPOT", "ms"),
}


def explain_text(explanation: Explanation) -> str:
    """Return the page that `llmb-run explain` prints."""
    parts = [f"{explanation.subject}\n{_verdict(explanation)}"]
    if explanation.limits:
        rows = [
            (
                limit.name,
                number(limit.needed),
                number(limit.limit),
                limit.unit,
                f"{100 * limit.fraction:.1f}",
                limit.basis,
            )
            for limit in explanation.limits
        ]
        parts.append(render(("limit of the chip", "needed", "at most", "unit", "% of it", "limit by"), rows))
    if explanation.causes:
        parts.append("\n".join(["would be possible with:", *(f"- {cause}" for cause in explanation.causes)]))
    if explanation.expected:
        header = ("against the prediction", "measured", "predicted", "80 % interval", "unit", "ratio", "")
        parts.append(render(header, [_expected_row(item) for item in explanation.expected]))
    if explanation.published:
        published = [
            (
                match.metric,
                number(match.value),
                match.run,
                "-" if match.ratio is None else f"{match.ratio:.3f}",
                match.source,
            )
            for match in explanation.published[:MOST_PUBLISHED]
        ]
        parts.append(render(("published", "value", "run", "ratio", "source"), published))
    if explanation.terms:
        parts.append(_terms(explanation))
    parts += explanation.notes
    return "\n\n".join(parts)


def _verdict(explanation: Explanation) -> str:
    if explanation.verdict == "unknown":
        return "possible? unknown: no limit of its hardware is known"
    worst = max(explanation.limits, key=lambda limit: limit.fraction)
    where = f"{number(worst.needed)} of {number(worst.limit)} {worst.unit} ({worst.name})"
    if explanation.verdict == "impossible":
        return f"IMPOSSIBLE as described: it needs {worst.fraction:.2f} times what the chip gives at most, {where}"
    return f"possible: at {100 * worst.fraction:.0f} % of the nearest limit, {where}"


def _expected_row(item: Expected) -> tuple[str, ...]:
    title, unit = METRICS[item.metric]
    low, high = item.interval_80
    side = "within" if item.within else ("faster than" if item.ratio > 1 else "slower than")
    return (
        title, number(item.measured), number(item.predicted), f"{number(low)}-{number(high)}", unit,
        f"{item.ratio:.3f}", f"{side} the interval",
    )  # fmt: skip


def _terms(explanation: Explanation) -> str:
    """Return measured and predicted seconds side by side; the last column is what the measured run takes more."""
    rows = [
        (
            pair.kind,
            "-" if pair.measured_s is None else f"{pair.measured_s:.4f}",
            "-" if pair.predicted_s is None else f"{pair.predicted_s:.4f}",
            "-"
            if pair.measured_s is None or pair.predicted_s is None
            else f"{pair.measured_s - pair.predicted_s:+.4f}",
        )
        for pair in explanation.terms
    ]
    return render(("where the time goes", "measured s", "predicted s", "difference"), rows)
