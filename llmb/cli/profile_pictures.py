"""Profile of a run: its path and how to open it, and the page of an out-of-core run: its measured stream
timeline beside the predicted one.

Drawing and simulation are imported only for a profiled run, as every command that ends a run calls this module.
"""

import sys
from pathlib import Path

from llmb.config.serialization import build
from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import LlmbError
from llmb.launch.engines import nsys_command
from llmb.launch.run_folder import RunFolder
from llmb.perfmodel import hardware
from llmb.perfmodel.offload.stream_timeline import StreamTimeline, read_timeline


def describe_profile(run: RunFolder, config: RunConfig) -> list[str]:
    """Return lines with each kind of profile that the run has written and the program that opens it."""
    if not config.profile.profile:
        return []
    lines = (
        [f"profile: {run.short_path_of(run.profile_page)}", "  open it in a browser"]
        if run.profile_page.exists()
        else []
    )
    lines += _files(run, "trace", sorted(run.profile.glob("trace*.json.gz")), "open it in ui.perfetto.dev")
    reports = sorted(run.work.glob(f"{nsys_command.FOLDER}/*.nsys-rep"))
    lines += _files(run, "profile", reports, "open it in Nsight Systems: nsys-ui FILE, or nsys stats FILE")
    return lines or [f"profile: none was written; the log may say why: {run.short_path_of(run.log)}"]


def _files(run: RunFolder, kind: str, paths: list[Path], how: str) -> list[str]:
    """Return the first file, on a line of its own to be copied; those of other ranks lie beside it."""
    if not paths:
        return []
    others = f"; {len(paths) - 1} more beside it, one per rank" if len(paths) > 1 else ""
    return [f"{kind}: {run.short_path_of(paths[0])}", f"  {how}{others}"]


def draw_profile(run: RunFolder, config: RunConfig) -> None:
    """Write profile.html beside lanes.json; a failure to draw does not affect the result."""
    from llmb.report.plan_figures import plan_figures
    from llmb.report.plan_text import expectations
    from llmb.report.timeline.profile_page import write_profile

    work = config.workload
    if not isinstance(work, OutOfCore) or work.plan is None:
        return
    try:
        figures = expectations(plan_figures(config))
        write_profile(
            run.profile, read_timeline(run.stream_timeline), predicted_timeline(config, work), config.name, figures
        )
    except LlmbError as error:
        print(f"warning: no profile.html: {error}", file=sys.stderr)


def predicted_timeline(config: RunConfig, work: OutOfCore) -> StreamTimeline | None:
    """Return the timeline of the plan's simulation, or None if the machine's rates are unknown."""
    from llmb.perfmodel.offload.machine_rates import Rates
    from llmb.perfmodel.offload.simulator import simulate

    if work.plan is None or work.prediction is None or work.prediction.step_s is None:
        return None
    rates = build(Rates, work.prediction.rates, "rates of the plan")
    peak = hardware.peak_flops(config.machine.gpu, work.plan.dtype)
    return StreamTimeline(
        source="predicted",
        events=simulate(config.model, work.plan, rates, with_events=True).events,
        link_gbs=(rates.link_in_gbs, rates.link_out_gbs),
        peak_tflops=None if peak is None else peak / hardware.TERA,
    )
