"""Rates that `llmb-run probe` measured and stored here, for predictions of a GPU that a command line names."""

import os

from llmb.errors import ConfigError, UnknownName
from llmb.launch.install_root import install_root
from llmb.perfmodel.hardware import UNLISTED
from llmb.perfmodel.offload.machine_rates import Rates, measured_rates
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, device


def gpu_name(text: str) -> str:
    """Return the GPU type that a user names, listed or not."""
    return text.strip().lower().removeprefix(UNLISTED)


def stored_rates(gpu: str, native: bool, dtype: str | None = None) -> Rates | None:
    """Return what `probe` measured of a GPU: of a fitted one for the native engine only, of any other for all engines.

    A GPU that is neither fitted nor measured is refused, and so is a dtype whose GEMMs were not measured.
    """
    if gpu in FABRICS and not native:
        return None
    rates = measured_rates(gpu, install_root(os.environ)) if gpu != "cpu" else None
    if rates is None:
        _refuse_unfitted(gpu)
    elif gpu not in FABRICS and dtype is not None and dtype.startswith("fp8") and rates.fp8_tflops is None:
        raise ConfigError(f"the rate of {dtype} GEMMs was not measured on {gpu}; use --dtype bf16")
    return rates


def _refuse_unfitted(gpu: str) -> None:
    """Raise an error that lists the fitted GPUs and says how another is measured."""
    try:
        device(gpu)
    except UnknownName as error:
        raise ConfigError(
            f"{error}; of any other GPU `llmb-run probe` measures the rates that predictions use"
        ) from error
