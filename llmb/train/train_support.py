"""Check in a rank that the training engine runs a configuration: as at the desk, and what only a rank can tell."""

from llmb.config.native.training_support import supported_training
from llmb.config.spec import RunConfig, Training
from llmb.runtime.profile_window import check_gpu_metrics


def supported_workload(config: RunConfig) -> Training:
    """Return the training workload of a configuration, or raise ConfigError if a setting is not supported."""
    workload = supported_training(config)
    check_gpu_metrics(config.profile)
    return workload
