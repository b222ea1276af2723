"""Models of `dense_cases.py` and `mixture_cases.py` that are trained out of core."""

from dense_cases import DENSE_CASES
from mixture_cases import MIXTURE_CASES

from llmb.config.model import Model
from llmb.config.native.outofcore_support import check_outofcore_model
from llmb.errors import ConfigError


def _is_supported(model: Model) -> bool:
    try:
        check_outofcore_model(model, "bf16")
    except ConfigError:
        return False
    return True


OUTOFCORE_CASES = [model for model in (*DENSE_CASES, *MIXTURE_CASES) if _is_supported(model)]
