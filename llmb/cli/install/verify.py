"""`llmb-install verify`: missing, short, extra or corrupted files of a folder of weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.cli.subcommand import command

if TYPE_CHECKING:
    from llmb.formats.published_sizes import PublishedSizes


def add_command(commands: Any) -> None:
    """Register verify."""
    verify = command(
        commands, "verify", _run, "List missing, short, extra or corrupted files of a folder of weights.",
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
        report = check_folder(options.folder, _listing(options.folder, options.like), line.draw)
    finally:
        line.close()
    if options.json:
        print(to_json({"well": not report.problems, **to_plain(report)}))
        return 1 if report.problems else 0
    for problem in report.problems:
        print(_printable(f"{problem.kind:<10}  {problem.file}: {problem.message}"))
    print(f"{report.folder}: {report.shards} files of weights, {report.bytes / GIB:.1f} GiB")
    print(f"checked: {', '.join(report.checked)}")
    for reason in report.not_checked:
        print(f"not checked: {reason}")
    print(f"problems: {len(report.problems) or 'none'}")
    return 1 if report.problems else 0


def _printable(text: str) -> str:
    """Escape control characters, which names of tensors may contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _listing(folder: Path, like: str | None) -> "PublishedSizes | None":
    """Return the published sizes named by --like, or those of the model in the folder's name."""
    from llmb.errors import UnknownName
    from llmb.formats.published_sizes import published_sizes

    listings = published_sizes()
    if like is None:
        name = folder.resolve().name.lower()
        return next((listing for listing in listings.values() if listing.name.lower() in name), None)
    if like != "none" and like not in listings:
        raise UnknownName("list of sizes", like, [*listings, "none"])
    return listings.get(like)
