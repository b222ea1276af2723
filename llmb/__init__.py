"""llmb: how fast a large language model trains or serves on this hardware, whether that is good, and why.

    import llmb

    config = llmb.resolve("pretrain_llama3.1", size="8b", dtype="bf16", gpus=1, proxy=True)
    result = llmb.run(config)
    result.tokens_per_s, result.warnings, result.samples[0]

docs/api.md lists every public name. Names are imported when they are first used: `import llmb` costs nothing, and
neither torch nor a file is touched until something runs.
"""

TYPE_CHECKING = False  # typing's own costs several ms to import
if TYPE_CHECKING:
    from llmb.api.comparison import Comparison, compare
    from llmb.api.configuration import predict, resolve
    from llmb.api.local_run import run
    from llmb.api.stored_jobs import runs
    from llmb.api.stored_result import Result, load
    from llmb.config.spec import Predicted, RunConfig
    from llmb.errors import ConfigError, LaunchError, LlmbError
    from llmb.results.job_store import Job

__version__ = "0.1.0"
__all__ = [
    "Comparison", "ConfigError", "Job", "LaunchError", "LlmbError", "Predicted", "Result", "RunConfig", "__version__",
    "compare", "load", "predict", "resolve", "run", "runs",
]  # fmt: skip
_MODULES = {
    "Comparison": "llmb.api.comparison",
    "ConfigError": "llmb.errors",
    "Job": "llmb.results.job_store",
    "LaunchError": "llmb.errors",
    "LlmbError": "llmb.errors",
    "Predicted": "llmb.config.spec",
    "Result": "llmb.api.stored_result",
    "RunConfig": "llmb.config.spec",
    "compare": "llmb.api.comparison",
    "load": "llmb.api.stored_result",
    "predict": "llmb.api.configuration",
    "resolve": "llmb.api.configuration",
    "run": "llmb.api.local_run",
    "runs": "llmb.api.stored_jobs",
}


if not TYPE_CHECKING:  # a type checker knows the names above, and no other

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'llmb' has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = value = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
