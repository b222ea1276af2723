"""llmb-install: makes $LLMB_INSTALL and says what this machine can run.

llmb-install            make the folder, check what is here
llmb-install --json     the same as JSON
"""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from typing import Any

from llmb import __version__
from llmb.cli.parsing import Parser
from llmb.cli.run import guarded


def main() -> int:
    """Make the folder and print the findings."""
    said = "Make the folder for runs and say what this machine can run."
    lines = "examples:\n  llmb-install\n  LLMB_INSTALL=/shared/llmb llmb-install --json\n"
    top = Parser(prog="llmb-install", description=said, epilog=lines)
    top.add_argument("--version", action="version", version=f"llmb {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    top.add_argument("--json", action="store_true", help="as JSON")
    options = top.parse_args()
    return guarded(lambda: _install(options), options.verbose)


def _install(options: argparse.Namespace) -> int:
    from llmb.launch.root import install_root
    from llmb.launch.rundir import store_path
    from llmb.plain import to_json
    from llmb.report.table import render
    from llmb.results.store import Store

    root = install_root(os.environ)
    with Store(store_path(root)):
        pass
    found = {"folder": str(root), **_findings()}
    print(to_json(found) if options.json else render(("what", "found"), list(found.items())))
    if not options.json:
        print("\nnext: llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy")
    return 0


def _findings() -> dict[str, Any]:
    """Facts only; nothing here is needed for a dry run."""
    from llmb import hardware
    from llmb.launch.machine import gpu_names

    names = gpu_names()
    torch = importlib.util.find_spec("torch") is not None
    return {
        "python": platform.python_version(),
        "engine": "torch is installed" if torch else "not installed: pip install 'llmb[engine]'",
        "GPUs": f"{len(names)} x {names[0]}" if names else "none: use --proxy",
        "GPU type": hardware.recognise(names[0]) if names else None,
        "Slurm": "sbatch found" if shutil.which("sbatch") else "not found: runs are local",
        "free disk GiB": round(shutil.disk_usage(os.path.expanduser("~")).free / hardware.GIB, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
