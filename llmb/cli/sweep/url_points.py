"""Points measured over HTTP: one load of the load generator each, its events in the point's folder."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmb.cli.sweep.plan_builder import sweep_name
from llmb.cli.sweep.sweep_loop import Measurement
from llmb.config.load_settings import LoadSettings, SloLimits, check_load, check_url, load_config
from llmb.config.serialization import to_json, to_plain, write_atomic
from llmb.errors import ConfigError, LaunchError
from llmb.events import Event, append, read
from llmb.loadgen.sweep.sweep_plan import PointLoad
from llmb.results.derive import derive
from llmb.results.sweep.slo import parse_slo
from llmb.results.sweep.sweep_points import PointKey

WARMUP_REQUESTS = 2  # before the first point on a server
REFUSALS = ("CLIENT_LATE",)  # warnings with which the client refuses a verdict


class UrlPoints:
    """Driver of points on a server."""

    def __init__(self, settings: LoadSettings, gpus: int | None, on_event: Callable[[Event], None], say: Any):
        self._settings, self._gpus, self._on_event, self._say = settings, gpus, on_event, say
        self._warm = False

    def prepare(self, key: PointKey) -> None:
        """Nothing: the server runs already."""

    def measure(self, key: PointKey, load: PointLoad, folder: Path) -> Measurement:
        """Run one load; Ctrl-C leaves the point unfinished."""
        from llmb.loadgen.load_test import run_load

        settings = point_settings(self._settings, key, load, 0 if self._warm else WARMUP_REQUESTS)
        config, path = load_config(settings, self._gpus), folder / "events.rank0.jsonl"
        write_atomic(folder / "config.json", to_json(config, indent=2) + "\n")

        def record(event: Event) -> None:
            append(path, event)
            self._on_event(event)

        outcome = run_load(settings, record, self._say if not self._warm else lambda _: None)
        if outcome.interrupted:
            raise KeyboardInterrupt
        self._warm = True
        result = derive(config, read(path))
        if result.requests_failed or not result.requests:
            self._check_alive(result.reason)
        refusal = next((warning.text for warning in result.warnings if warning.code in REFUSALS), None)
        return Measurement(result=result, client_refusal=refusal, client=getattr(result, "client", None) or {})

    def _check_alive(self, reason: str | None) -> None:
        """Raise if the server is gone: the point is then unfinished, not failed."""
        from llmb.loadgen.client.request_body import ROUTES
        from llmb.loadgen.load_test import api_key_of
        from llmb.loadgen.readiness import wait_ready

        settings = self._settings
        try:
            wait_ready(settings.base_url, settings.model, api_key_of(settings), 5.0, ROUTES[settings.endpoint])
        except LaunchError as error:
            raise LaunchError(f"the server is gone: {error}; {reason}") from error


def point_settings(settings: LoadSettings, key: PointKey, load: PointLoad, warmup: int) -> LoadSettings:
    """Return the load of one point; repeats have prompts of their own, so that no cache has seen them."""
    seed = settings.seed + key.repeat - 1 + 1000 * round(key.load * 100)
    common: dict[str, Any] = {"num_requests": load.requests, "seed": seed, "warmup_requests": warmup}
    if key.load_kind == "rate":
        common |= {"timeout_s": min(settings.timeout_s, load.timeout_s or settings.timeout_s)}
        return replace(settings, arrivals="poisson", rate=key.load, concurrency=None, **common)
    common |= {"ramp_s": load.ramp_s, "duration_s": load.limit_s}
    common |= {"num_requests": None, "duration_s": load.for_s} if load.for_s is not None else {}
    return replace(settings, arrivals="concurrency", concurrency=int(key.load), rate=None, **common)


def url_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a plan that come from a server's address and the requests."""
    from llmb.cli.load import load_settings

    if options.trace is not None:
        raise ConfigError("--trace has times of its own; a sweep sets them. Use llmb-run load --trace")
    url = check_url(options.base_url)
    model = options.model or _only_model(url, options.api_key_env)
    arrival = {"concurrency": 1, "rate": None, "burstiness": None, "constant": False, "requests": 2, "duration": None}
    others = {"ramp": 0.0, "ramp_start": 0.0, "warmup": 0, "slo": None, "gpu_cost_per_hour": None, "no_stream": False}
    timeouts = {"request_timeout": 600.0, "ready_timeout": 60.0}
    chosen = argparse.Namespace(**{**vars(options), **arrival, **others, **timeouts, "base_url": url, "model": model})
    settings = load_settings(chosen)
    check_load(settings)
    lengths = "requests of a file" if settings.dataset else f"{settings.isl}/{settings.osl}"
    return {
        "name": sweep_name(model),
        "isl": None if settings.dataset else settings.isl,
        "osl": None if settings.dataset else settings.osl,
        "gpus": options.gpus,
        "target": f"{model} at {url}, {lengths}",
        "configs": {"": {"load": to_plain(settings)}},
    }


def goodput_limits(tiers: dict[str, str]) -> SloLimits | None:
    """Return the limits of a single tier, by which every request is judged for goodput."""
    if len(tiers) != 1:
        return None
    limits: dict[str, float] = {}
    for limit in parse_slo(next(iter(tiers.values()))):  # of two statistics of a latency the wider limit
        limits[limit.figure] = max(limit.limit, limits.get(limit.figure, 0.0))
    return SloLimits(**limits)


def _only_model(url: str, api_key_env: str | None) -> str:
    """Return the name of the model that the server lists, if it lists one."""
    import http.client

    from llmb.loadgen.load_test import read_api_key
    from llmb.loadgen.readiness import get

    api_key = read_api_key(api_key_env) if api_key_env is not None else None
    try:
        status, body = get(url, "/v1/models", api_key)
        names = [entry["id"] for entry in json.loads(body)["data"]] if status == 200 else []
    except (OSError, http.client.HTTPException) as error:
        raise LaunchError(f"no server responds at {url}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, KeyError, TypeError):
        names = []
    if len(names) != 1:
        listed = ", ".join(names[:8]) or "none"
        raise ConfigError(f"name the model with --model; {url} lists: {listed}")
    return str(names[0])
