"""llmb-install: makes $LLMB_INSTALL and says what this machine can run; or says what is wrong with a folder of weights.

llmb-install                     make the folder, check what is here
llmb-install --json              the same as JSON
llmb-install verify FOLDER       missing, short, extra or corrupted files of downloaded weights
"""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb import __version__
from llmb.cli.parsing import Parser, command
from llmb.cli.run import guarded

if TYPE_CHECKING:
    from llmb.recipes.listing import Listing


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder and print the findings, or do what a command asks for."""
    said = "Make the folder for runs and say what this machine can run."
    lines = "examples:\n  llmb-install\n  LLMB_INSTALL=/shared/llmb llmb-install --json\n"
    lines += "  llmb-install verify DeepSeek-R1-FP4\n"
    top = Parser(prog="llmb-install", description=said, epilog=lines)
    top.add_argument("--version", action="version", version=f"llmb {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    top.add_argument("--json", action="store_true", help="as JSON")
    top.set_defaults(run=_install)
    _add_verify(top.add_subparsers(metavar="COMMAND", parser_class=Parser))
    options = top.parse_args(arguments)
    return guarded(lambda: options.run(options), options.verbose)


def _add_verify(commands: Any) -> None:
    verify = command(
        commands, "verify", _verify, "Say which files of a folder of weights are missing, short, extra or corrupted.",
        "llmb-install verify $LLMB_INSTALL/workloads/inference_deepseek-r1/DeepSeek-R1-FP4",
        "llmb-install verify weights --like fp8 --json",
    )  # fmt: skip
    verify.add_argument("folder", metavar="FOLDER", type=Path, help="in Hugging Face's layout")
    verify.add_argument("--like", metavar="NAME", help="published sizes: fp4, fp8 or none (by the folder's name)")
    verify.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")


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


def _verify(options: argparse.Namespace) -> int:
    from llmb.hardware import GIB
    from llmb.plain import to_json, to_plain
    from llmb.report.statusline import StatusLine
    from llmb.weightfolder import check_folder

    line = StatusLine()
    try:
        found = check_folder(options.folder, _listing(options.folder, options.like), line.draw)
    finally:
        line.close()
    if options.json:
        print(to_json({"well": not found.problems, **to_plain(found)}))
        return 1 if found.problems else 0
    for problem in found.problems:
        print(_printable(f"{problem.kind:<10}  {problem.file}: {problem.said}"))
    print(f"{found.folder}: {found.shards} files of weights, {found.bytes / GIB:.1f} GiB")
    print(f"checked: {', '.join(found.checked)}")
    for left in found.not_checked:
        print(f"not checked: {left}")
    print(f"problems: {len(found.problems) or 'none'}")
    return 1 if found.problems else 0


def _printable(text: str) -> str:
    """On one line whatever a file calls its tensors."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _listing(folder: Path, like: str | None) -> "Listing | None":
    """The list of sizes that was asked for, or that of the model which the folder is named after."""
    from llmb.errors import UnknownName
    from llmb.recipes.listing import listings

    known = listings()
    if like is None:
        name = folder.resolve().name.lower()
        return next((listing for listing in known.values() if listing.name.lower() in name), None)
    if like != "none" and like not in known:
        raise UnknownName("list of sizes", like, [*known, "none"])
    return known.get(like)


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
