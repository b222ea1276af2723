"""Check in its process that the out-of-core engine runs a configuration: as at the desk, and what only it can tell."""

from llmb.config.native.outofcore_support import supported_outofcore
from llmb.config.offload_plan import Plan
from llmb.config.spec import OutOfCore, RunConfig
from llmb.runtime.profile_window import check_gpu_metrics


def supported(config: RunConfig) -> tuple[OutOfCore, Plan]:
    """Return the workload and the plan of a configuration that this engine fully supports, or raise a ConfigError."""
    workload, plan = supported_outofcore(config)
    check_gpu_metrics(config.profile)
    return workload, plan
