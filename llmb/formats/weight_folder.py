"""Check a folder of weights: against its index, the headers of its files, published sizes, and checksum files.

    report = check_folder(Path("DeepSeek-R1-FP4"), published_sizes()["fp4"])
    report.problems  -> [Problem("short", "model-00012-of-00080.safetensors", "4096 bytes too short for ...")]

Reads headers, and whole files only for checksums. A file may be a symlink, as in Hugging Face's cache.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.config.serialization import read_json
from llmb.errors import ConfigError
from llmb.formats.checksums import ChecksumFile, checksum_files, verify_checksum
from llmb.formats.published_sizes import PublishedSizes
from llmb.formats.safetensors_header import ShardHeader, read_shard_header, summarize_names
from llmb.perfmodel.hardware import GIB

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"(.+-)(\d+)(-of-0*(\d+)\.safetensors)")
MOST_DIGITS = 5  # of the number of files in a series
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """One problem of a file."""

    kind: str  # missing, extra, short, long, corrupted, unreadable or index
    file: str
    message: str


@dataclass
class FolderReport:
    """Checks that were made, and their problems."""

    folder: str
    shards: int = 0
    bytes: int = 0
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, kind: str, file: str, message: str) -> None:
        """Add a problem; a file is reported as missing, short or long only once."""
        reported = {(problem.kind, problem.file) for problem in self.problems}
        if kind == "corrupted" or (kind, file) not in reported:
            self.problems.append(Problem(kind, file, message))

    def has(self, *kinds: str, file: str | None = None) -> bool:
        return any(p.kind in kinds and file in (None, p.file) for p in self.problems)


def check_folder(
    folder: Path, listing: PublishedSizes | None = None, progress: Progress = lambda _: None
) -> FolderReport:
    """Run all checks."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    if not files and not (folder / INDEX).exists():
        raise ConfigError(
            f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX} nor any other .safetensors file"
        )
    report = FolderReport(str(folder))
    weight_map, total = _index(folder, report)
    _check_files(files, weight_map, listing, report)
    shards = _check_headers(files, progress, report)
    if weight_map is not None:
        _check_tensors(shards, weight_map, report)
        _check_total(shards, weight_map, total, report)
        report.checked.append(INDEX)
    if listing is not None:
        _check_sizes(folder, {name: shard.size for name, shard in shards.items()}, listing, report)
        report.checked.append(f"sizes of {listing.name}")
    for checksums in checksum_files(folder):
        _check_checksums(checksums, progress, report)
    return report


def _index(folder: Path, report: FolderReport) -> tuple[dict[str, str] | None, Any]:
    """Return the weight map and total size of the index; None without a valid index."""
    if not (folder / INDEX).exists():
        return None, None
    try:
        index = read_json(folder / INDEX)
    except ConfigError:
        report.add("corrupted", INDEX, "cannot be read as JSON")
        return None, None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(_is_name(file) for file in weight_map.values()):
        report.add("corrupted", INDEX, "has no weight_map of tensors and the files of this folder")
        return None, None
    metadata = index.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _is_name(file: object) -> bool:
    return isinstance(file, str) and bool(file) and "/" not in file


def _check_files(
    files: dict[str, Path], weight_map: dict[str, str] | None, listing: PublishedSizes | None, report: FolderReport
) -> None:
    """Compare the files with the expected ones."""
    expected = {} if listing is None else dict.fromkeys(listing.sizes(), f"is listed for {listing.name}")
    expected |= dict.fromkeys(weight_map.values() if weight_map is not None else (), f"is named in {INDEX}")
    if weight_map is None and files.keys() != {SINGLE_FILE}:
        if not report.has("corrupted", file=INDEX):
            report.add("missing", INDEX, "is needed for several files")
        expected = dict.fromkeys(_complete_series(files), "is one of a series that is here") | expected
    for name, why in sorted(expected.items()):
        if name not in files:
            report.add("missing", name, why)
    for name in files:
        if expected and name not in expected:
            report.add("extra", name, "is not expected in this folder")


def _complete_series(files: dict[str, Path]) -> list[str]:
    """Return all names of the series that numbered files belong to."""
    names = []
    for match in filter(None, map(SHARD_NAME.fullmatch, files)):
        prefix, number, suffix, count = match.groups()
        if len(count) > MOST_DIGITS:  # no series: listing its missing files would take for ever
            continue
        names += [f"{prefix}{n:0{len(number)}}{suffix}" for n in range(1, int(count) + 1)]
    return [*dict.fromkeys([*names, *files])]


def _check_headers(files: dict[str, Path], progress: Progress, report: FolderReport) -> dict[str, ShardHeader]:
    """Return the headers of all files that can be opened."""
    shards: dict[str, ShardHeader] = {}
    for number, (name, path) in enumerate(files.items(), start=1):
        progress(f"header {number} of {len(files)}: {name}")
        try:
            shards[name] = read_shard_header(path)
        except FileNotFoundError:
            report.add("missing", name, "is a link to a file that is not there")
        except OSError as error:
            report.add("unreadable", name, error.strerror or str(error))
    for name, shard in shards.items():
        for kind, message in shard.faults:
            report.add(kind, name, message)
    report.shards, report.bytes = len(shards), sum(shard.size for shard in shards.values())
    report.checked.append(f"{len(shards)} headers")
    return shards


def _check_tensors(shards: dict[str, ShardHeader], weight_map: dict[str, str], report: FolderReport) -> None:
    """Compare the tensors of each file with the index."""
    by_file: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        by_file.setdefault(file, set()).add(tensor)
    for name, shard in shards.items():
        if not shard.readable or name not in by_file:
            continue
        if absent := by_file[name] - shard.tensors.keys():
            report.add("corrupted", name, f"lacks {summarize_names([*absent])} that the index places there")
        if unknown := shard.tensors.keys() - by_file[name]:
            report.add("corrupted", name, f"has {summarize_names([*unknown])} that the index does not place there")


def _check_total(shards: dict[str, ShardHeader], weight_map: dict[str, str], total: Any, report: FolderReport) -> None:
    """Compare the total size of all tensors, or of all files as in some indexes; only if all can be read."""
    headers = [shards.get(name) for name in set(weight_map.values())]
    readable = [shard for shard in headers if shard is not None and shard.readable]
    if total is None or len(readable) < len(headers):
        return
    tensor_bytes, file_bytes = (
        sum(sum(shard.tensors.values()) for shard in readable),
        sum(shard.size for shard in readable),
    )
    if total not in (tensor_bytes, file_bytes):
        report.add("index", INDEX, f"has a total_size of {total} bytes, and the tensors have {tensor_bytes}")


def _check_sizes(folder: Path, sizes: dict[str, int], listing: PublishedSizes, report: FolderReport) -> None:
    """Compare sizes with `ls -lh` of a good copy: GiB with one decimal, rounded up; then the sum of all files."""
    for name, printed in listing.sizes().items():
        tenths = None if name not in sizes else -(-sizes[name] * 10 // GIB)
        if tenths is not None and tenths != round(printed * 10) and not report.has("short", "long", file=name):
            kind = "short" if tenths < round(printed * 10) else "long"
            report.add(kind, name, f"has {tenths / 10}G, and {listing.name} is listed with {printed}G")
    total = -(-sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) // GIB)
    if total != listing.total_gib and not report.has("missing", "extra", "short", "long"):
        kind = "short" if total < listing.total_gib else "long"
        report.add(kind, ".", f"all files have {total}G, and {listing.name} is listed with {listing.total_gib}G")


def _check_checksums(checksums: ChecksumFile, progress: Progress, report: FolderReport) -> None:
    for line in checksums.invalid_lines:
        report.add("corrupted", checksums.path.name, f"has a line that is no checksum of a file here: {line[:60]!r}")
    if checksums.unavailable:
        report.not_checked.append(checksums.unavailable)
        return
    present = {
        name: checksums.path.parent / name for name in checksums.digests if (checksums.path.parent / name).is_file()
    }
    for name in sorted(checksums.digests.keys() - present.keys()):
        report.add("missing", name, f"is named in {checksums.path.name}")
    total, done = sum(path.stat().st_size for path in present.values()), 0

    def add_progress(count: int) -> None:
        nonlocal done
        done += count
        progress(f"{checksums.path.name}: {done / GIB:.1f} of {total / GIB:.1f} GiB")

    for name in present:
        try:
            if not verify_checksum(checksums, name, add_progress):
                report.add("corrupted", name, f"has another checksum than {checksums.path.name} says")
        except OSError as error:
            report.add("unreadable", name, error.strerror or str(error))
    report.checked.append(f"{len(present)} checksums of {checksums.path.name}")
