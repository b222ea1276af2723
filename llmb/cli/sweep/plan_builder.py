"""Plan of a sweep from the command line: loads, variants, limits; everything is checked before anything is measured."""

import argparse
import os
import re
from typing import Any, Literal

from llmb.errors import ConfigError
from llmb.formats.yaml_file import load_yaml
from llmb.loadgen.sweep.ladder import Precision, parse_ladder, parse_precision
from llmb.loadgen.sweep.sweep_plan import SweepPlan
from llmb.results.sweep.slo import parse_slo, parse_tiers

DEFAULT_RATE_PRECISION = Precision(relative=0.05)
SEARCHED = (1, 1024)  # concurrency, where --slo is given without a ladder
LONGEST_S = 86_400.0
SLO_RAMP = 0.5  # users who all start at once wait for one another's prompts, which no limit is meant for
# Options of run_options that `llmb-run serve` takes as well.
SERVE_OPTIONS = {
    "workload": "-w", "size": "-s", "dtype": "--dtype", "scale": "--scale", "gpu_type": "--gpu-type",
    "proxy": "--proxy", "layout": "--layout", "device_gb": "--device-gb",
}  # fmt: skip


def build_plan(options: argparse.Namespace) -> SweepPlan:
    """Return the plan, or raise on the first contradiction."""
    _check(options)
    fields: dict[str, Any] = _loads(options) | _limits(options)
    fields |= {"repeats": options.repeats, "point_s": options.point_seconds, "waves": options.waves}
    fields["ramp"] = options.ramp if options.ramp is not None else SLO_RAMP if "tiers" in fields else 0.0
    if options.base_url:
        from llmb.cli.sweep.url_points import url_fields

        return SweepPlan(mode="url", **_with_ladder(fields, None), **url_fields(options))
    from llmb.cli.sweep.engine_configs import engine_fields

    mode: Literal["in_process", "serve"] = "in_process" if options.in_process else "serve"
    variants, settings = split_settings(options.set)
    engine = engine_fields(options, mode, variants, settings)
    concurrency = engine.pop("concurrency")
    return SweepPlan(mode=mode, **_with_ladder(fields, concurrency), **engine)


def _check(options: argparse.Namespace) -> None:
    if bool(options.base_url) == bool((options.workload or "").strip(", ")):
        raise ConfigError("give what to measure: a server with --base-url, or a workload with -w (see llmb-run list)")
    if options.base_url and (options.in_process or options.set):
        option = "--in-process" if options.in_process else "--set"
        raise ConfigError(f"{option} is for -w: a server that runs already keeps its settings")
    if options.concurrency and options.rate:
        raise ConfigError("--concurrency and --rate are two kinds of load; give one of them")
    if options.slo and options.slo_tiers:
        raise ConfigError("--slo and --slo-tiers exclude each other; put all tiers into the file")
    if (options.precision or options.all_points) and not (options.slo or options.slo_tiers):
        raise ConfigError("--precision and --all-points have no effect without --slo or --slo-tiers")
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats}: at least 1 is needed")
    for option, value in (("--point-seconds", options.point_seconds), ("--waves", options.waves)):
        if not 0 < value < LONGEST_S:
            raise ConfigError(f"{option} {value:g}: expected more than 0")
    if options.ramp is not None and not 0 <= options.ramp <= 10:
        raise ConfigError(f"--ramp {options.ramp:g}: expected a fraction of a request's time, such as 0.5")
    if options.ramp is not None and options.rate:
        raise ConfigError("--ramp is for --concurrency: a rate has no users who start at once")
    if options.gpus is not None and options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}: expected 1 or more")


def _loads(options: argparse.Namespace) -> dict[str, Any]:
    """Return kind and ladder; no ladder where the recipe's concurrency or a search without a range decides."""
    if options.rate:
        return {"load_kind": "rate", "ladder": parse_ladder(options.rate, option="--rate")}
    text = options.concurrency
    ladder = parse_ladder(text, whole=True, option="--concurrency") if text else None
    return {"load_kind": "concurrency", "ladder": ladder}


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    if options.slo:
        tiers = {"slo": options.slo}
        parse_slo(options.slo)
    elif options.slo_tiers:
        tiers = _read_tiers(options.slo_tiers)
    else:
        return {}
    default = DEFAULT_RATE_PRECISION if options.rate else Precision()
    precision = parse_precision(options.precision) if options.precision else default
    return {"tiers": tiers, "search": not options.all_points, "precision": precision}


def _read_tiers(path: Any) -> dict[str, str]:
    """Return the tiers of a file in the form of --slo."""
    try:
        content = load_yaml(path, "tiers such as chat: {ttft: 500ms, tpot: 30ms}")
    except ConfigError as error:
        raise ConfigError(f"--slo-tiers: {error}") from error
    tiers = parse_tiers(content, str(path))
    return {
        name: ",".join(f"{limit.figure.removesuffix('_ms')}.{limit.statistic}={limit.limit:g}ms" for limit in limits)
        for name, limits in tiers.items()
    }


def _with_ladder(fields: dict[str, Any], concurrency: int | None) -> dict[str, Any]:
    """Fill in a ladder that was not given: a search's range, or the concurrency of the recipe."""
    if fields["ladder"] is None:
        if fields.get("search"):
            fields["ladder"] = SEARCHED
        elif concurrency is not None:
            fields["ladder"] = (concurrency,)
        else:
            raise ConfigError("no load is given; write --concurrency 1..256, --rate 1..50, or limits with --slo")
    return fields


def split_settings(pairs: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split --set into the values of the one setting that varies, and the settings that do not."""
    varying = [pair for pair in pairs if re.fullmatch(r"[\w.]+=[\d.,+e\s]+", pair) and re.search(r",|\.\.", pair)]
    if len(varying) > 1:
        raise ConfigError(f"--set: one setting may vary, these do: {'; '.join(varying)}")
    if not varying:
        return ("",), pairs
    field, _, text = varying[0].partition("=")
    values = parse_ladder(text, option=f"--set {field}")
    constant = [pair for pair in pairs if pair != varying[0]]
    return tuple(f"{field}={value:.15g}" for value in values), constant


def serve_arguments(options: argparse.Namespace, settings: list[str]) -> list[str]:
    """Return the options of `llmb-run serve` for the same configuration."""
    arguments = []
    for name, flag in SERVE_OPTIONS.items():
        value = getattr(options, name)
        if value is not None:
            arguments += [flag, str(value)]
    for setting in settings:
        arguments += ["--set", setting]
    return [*arguments, *(["--force"] if options.force else [])]


def sweep_name(*words: str | None) -> str:
    """Return a name for the sweep's folder."""
    text = "_".join(word for word in words if word)
    return re.sub(r"[^\w.-]+", "-", text)[:120].strip("-.") or "sweep"


def install_folder() -> Any:
    """Return $LLMB_INSTALL."""
    from llmb.launch.install_root import install_root

    return install_root(os.environ)
