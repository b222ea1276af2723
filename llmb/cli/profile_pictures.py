"""The page of pictures of an out-of-core run that was profiled: what its lanes did, beside what its plan expected.

What draws and simulates is imported only where there is something to draw: every command that ends a run comes by here.
"""

import sys

from llmb.config.serialization import build
from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import LlmbError
from llmb.launch.run_folder import RunDir
from llmb.perfmodel import hardware
from llmb.perfmodel.offload.stream_timeline import Lanes, read_lanes


def draw_profile(run: RunDir, config: RunConfig) -> None:
    """Write profile.html beside lanes.json. A run whose pictures cannot be drawn has its result all the same."""
    from llmb.report.plan_figures import plan_figures
    from llmb.report.plan_text import expectations
    from llmb.report.timeline.profile_page import write_profile

    work = config.workload
    if not isinstance(work, OutOfCore) or work.plan is None:
        return
    try:
        figures = expectations(plan_figures(config))
        write_profile(run.profile, read_lanes(run.lanes), _expected(config, work), config.name, figures)
    except LlmbError as error:
        print(f"warning: no profile.html: {error}", file=sys.stderr)


def _expected(config: RunConfig, work: OutOfCore) -> Lanes | None:
    """The same lanes as the plan's simulation has them; none where nobody has measured the machine."""
    from llmb.perfmodel.offload.machine_rates import Rates
    from llmb.perfmodel.offload.simulator import simulate

    if work.plan is None or work.prediction is None or work.prediction.step_s is None:
        return None
    rates = build(Rates, work.prediction.rates, "rates of the plan")
    peak = hardware.peak_flops(config.machine.gpu, work.plan.dtype)
    return Lanes(
        source="predicted",
        stretches=simulate(config.model, work.plan, rates, shown=True).stretches,
        link_gbs=(rates.link_in_gbs, rates.link_out_gbs),
        peak_tflops=None if peak is None else peak / hardware.TERA,
    )
