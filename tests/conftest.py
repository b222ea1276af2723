"""Every test starts with a clean environment: no recipe variable, no proxy, its own $LLMB_INSTALL."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from campaign_counts import counts_file, record_campaigns
from hypothesis import settings

from llmb.config.overrides import SELECTOR_VARIABLES, VARIABLES
from llmb.config.recipe import load_all, shipped

gc.disable()  # while thousands of modules and tests are built, nothing of which is garbage

if not list(Path("/dev").glob("nvidia[0-9]*")):
    # No GPU: Triton kernels run in its interpreter. That is chosen when Triton is first imported, which torch may do.
    os.environ["TRITON_INTERPRET"] = "1"


# Nothing is timed: an example that takes 0.2 s on a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure() -> None:
    """A suite started in the background inherits that Ctrl-C and hang-up are ignored; what it starts must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Of tests that are handed out by file, those of these files begin first: none of them should be the last to end. Other
# files with slow tests follow, and files with fast ones fill the gaps at the end.
LONGEST_FILES = (
    "test_readme",
    "test_layout_training",
    "test_fault_injection",
    "test_multi_node_parity",
    "test_http_lifecycle",
    "test_slurm_commands",
    "test_sweep_engines",
    "test_faults",
    "test_parallel_layouts",
    "test_precision",
    "test_slurm_runs",
    "test_http_faults",
    "test_http_parallel",
    "test_registered_ops",
    "test_parallel_serving",
    "test_checkpoint_layouts",
    "test_plan_search",
    "test_serve_clients",
    "test_parity",
    "test_offload_gpu",
    "test_models_gpu",
    "test_full_size_ops",
    "test_explicit_layers_gpu",
    "test_llama_layer_gpu",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("slurm")}
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), item.path not in slow))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through all imported modules again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def campaign(record_property):
    """Counts cases of a campaign: `campaign("mutated inputs", 30_000)`; `make test-all` adds up those that passed."""

    def count(name: str, cases: int) -> None:
        record_property(f"campaign {name}", cases)

    return count


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = counts_file(os.environ)
    if path is not None and report.when == "call" and not report.skipped:
        record_campaigns(path, report)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    # COLUMNS: readline, which pytest imports, sets it for child processes, the workers of xdist among them.
    for variable in (*VARIABLES, *SELECTOR_VARIABLES, "HF_TOKEN", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "llmb"))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])


@pytest.fixture(scope="session")
def recipes():
    return load_all([shipped()])


@pytest.fixture(scope="session")
def command_parser():
    from llmb.cli.llmb_run import parser

    return parser()


@pytest.fixture
def llmb_run(capsys, monkeypatch, command_parser):
    """Runs a command line in this process; gives exit code, stdout and stderr. All share a parser: it takes 10 ms."""
    from llmb.cli.llmb_run import main

    monkeypatch.setattr("llmb.cli.llmb_run.parser", lambda: command_parser)

    def call(*arguments: str):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call
