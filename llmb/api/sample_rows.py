"""Samples of a run as plain rows, for a table of pandas or of anything else."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from llmb.events import RequestDone, StepDone
from llmb.perfmodel import metrics

LATENCIES = {"ttft_ms": metrics.ttft_ms, "tpot_ms": metrics.tpot_ms, "e2e_ms": metrics.e2e_ms}


def sample_rows(samples: Iterable[StepDone | RequestDone]) -> list[dict[str, Any]]:
    """Return a row per step or request; of requests with their latencies, None for one that failed."""
    return [_request(sample) if isinstance(sample, RequestDone) else asdict(sample) for sample in samples]


def _request(request: RequestDone) -> dict[str, Any]:
    latencies = {name: None if request.error else figure(request) for name, figure in LATENCIES.items()}
    return asdict(request) | latencies
