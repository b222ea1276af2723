"""`llmb-install verify`: which files of a folder of weights are missing, short, extra or corrupted."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.cli.subcommand import command

if TYPE_CHECKING:
    from llmb.formats.published_sizes import Listing


def add_command(commands: Any) -> None:
    """Register verify."""
    verify = command(
        commands, "verify", _run, "Say which files of a folder of weights are missing, short, extra or corrupted.",
        "llmb-install verify $LLMB_INSTALL/workloads/inference_deepseek-r1/DeepSeek-R1-FP4",
        "llmb-install verify weights --like fp8 --json",
    )  # fmt: skip
    verify.add_argument("folder", metavar="FOLDER", type=Path, help="in Hugging Face's layout")
    verify.add_argument("--like", metavar="NAME", help="published sizes: fp4, fp8 or none (by the folder's name)")
    verify.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")


def _run(options: argparse.Namespace) -> int:
    from llmb.config.serialization import to_json, to_plain
    from llmb.formats.weight_folder import check_folder
    from llmb.perfmodel.hardware import GIB
    from llmb.report.status_line import StatusLine

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
    from llmb.formats.published_sizes import listings

    known = listings()
    if like is None:
        name = folder.resolve().name.lower()
        return next((listing for listing in known.values() if listing.name.lower() in name), None)
    if like != "none" and like not in known:
        raise UnknownName("list of sizes", like, [*known, "none"])
    return known.get(like)
