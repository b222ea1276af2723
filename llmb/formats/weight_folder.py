"""What is wrong with a folder of weights: against its index, the headers of its files, a published list of sizes, and
files of checksums where there are some.

    findings = check_folder(Path("DeepSeek-R1-FP4"), listings()["fp4"])
    findings.problems  -> [Problem("short", "model-00012-of-00080.safetensors", "4096 bytes too short for ...")]

Reads headers, and whole files only for checksums. A file may be a link, as in Hugging Face's cache.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.config.serialization import read_json
from llmb.errors import ConfigError
from llmb.formats.checksums import Sums, is_same, sums_in
from llmb.formats.published_sizes import Listing
from llmb.formats.safetensors_header import Shard, inspect, some
from llmb.perfmodel.hardware import GIB

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBERED = re.compile(r"(.+-)(\d+)(-of-0*(\d+)\.safetensors)")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    kind: str  # missing, extra, short, long, corrupted, unreadable or index
    file: str
    said: str


@dataclass
class Findings:
    """What was looked at, and what came of it."""

    folder: str
    shards: int = 0
    bytes: int = 0
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, kind: str, file: str, said: str) -> None:
        """A file that is known to be missing, short or long is not named as that a second time."""
        known = {(problem.kind, problem.file) for problem in self.problems}
        if kind == "corrupted" or (kind, file) not in known:
            self.problems.append(Problem(kind, file, said))

    def has(self, *kinds: str, file: str | None = None) -> bool:
        return any(p.kind in kinds and file in (None, p.file) for p in self.problems)


def check_folder(folder: Path, listing: Listing | None = None, progress: Progress = lambda _: None) -> Findings:
    """Everything that can be checked."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    there = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    if not there and not (folder / INDEX).exists():
        raise ConfigError(f"{folder} holds no weights: neither {WHOLE} nor {INDEX} nor any other .safetensors file")
    findings = Findings(str(folder))
    places, total = _index(folder, findings)
    _check_files(there, places, listing, findings)
    shards = _check_headers(there, progress, findings)
    if places is not None:
        _check_tensors(shards, places, findings)
        _check_total(shards, places, total, findings)
        findings.checked.append(INDEX)
    if listing is not None:
        _check_sizes(folder, {name: shard.size for name, shard in shards.items()}, listing, findings)
        findings.checked.append(f"sizes of {listing.name}")
    for sums in sums_in(folder):
        _check_sums(sums, progress, findings)
    return findings


def _index(folder: Path, findings: Findings) -> tuple[dict[str, str] | None, Any]:
    """Where each tensor is to be, and how many bytes there are; None where there is no index, or none that is one."""
    if not (folder / INDEX).exists():
        return None, None
    try:
        index = read_json(folder / INDEX)
    except ConfigError:
        findings.add("corrupted", INDEX, "cannot be read as JSON")
        return None, None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(_is_name(file) for file in places.values()):
        findings.add("corrupted", INDEX, "has no weight_map of tensors and the files of this folder")
        return None, None
    metadata = index.get("metadata")
    return places, metadata.get("total_size") if isinstance(metadata, dict) else None


def _is_name(file: object) -> bool:
    return isinstance(file, str) and bool(file) and "/" not in file


def _check_files(
    there: dict[str, Path], places: dict[str, str] | None, listing: Listing | None, findings: Findings
) -> None:
    """Which are there against which should be."""
    wanted = {} if listing is None else dict.fromkeys(listing.sizes(), f"is listed for {listing.name}")
    wanted |= dict.fromkeys(places.values() if places is not None else (), f"is named in {INDEX}")
    if places is None and there.keys() != {WHOLE}:
        if not findings.has("corrupted", file=INDEX):
            findings.add("missing", INDEX, "is needed where there are several files")
        wanted = dict.fromkeys(_numbers(there), "is one of a series that is here") | wanted
    for name, why in sorted(wanted.items()):
        if name not in there:
            findings.add("missing", name, why)
    for name in there:
        if wanted and name not in wanted:
            findings.add("extra", name, "belongs to nothing that is known of this folder")


def _numbers(there: dict[str, Path]) -> list[str]:
    """All names of the series that numbered files belong to."""
    found = []
    for match in filter(None, map(NUMBERED.fullmatch, there)):
        start, number, rest, count = match.groups()
        found += [f"{start}{n:0{len(number)}}{rest}" for n in range(1, int(count) + 1)]
    return [*dict.fromkeys([*found, *there])]


def _check_headers(there: dict[str, Path], progress: Progress, findings: Findings) -> dict[str, Shard]:
    """Those of all files that can be opened."""
    shards: dict[str, Shard] = {}
    for number, (name, path) in enumerate(there.items(), start=1):
        progress(f"header {number} of {len(there)}: {name}")
        try:
            shards[name] = inspect(path)
        except FileNotFoundError:
            findings.add("missing", name, "is a link to a file that is not there")
        except OSError as error:
            findings.add("unreadable", name, error.strerror or str(error))
    for name, shard in shards.items():
        for kind, said in shard.faults:
            findings.add(kind, name, said)
    findings.shards, findings.bytes = len(shards), sum(shard.size for shard in shards.values())
    findings.checked.append(f"{len(shards)} headers")
    return shards


def _check_tensors(shards: dict[str, Shard], places: dict[str, str], findings: Findings) -> None:
    """What a file holds against what the index says that it holds."""
    by_file: dict[str, set[str]] = {}
    for tensor, file in places.items():
        by_file.setdefault(file, set()).add(tensor)
    for name, shard in shards.items():
        if not shard.readable or name not in by_file:
            continue
        if absent := by_file[name] - shard.tensors.keys():
            findings.add("corrupted", name, f"lacks {some([*absent])} that the index places there")
        if unknown := shard.tensors.keys() - by_file[name]:
            findings.add("corrupted", name, f"has {some([*unknown])} that the index does not place there")


def _check_total(shards: dict[str, Shard], places: dict[str, str], total: Any, findings: Findings) -> None:
    """The sum of all tensors, or of all files, which some indexes give instead; known only where all can be read."""
    named = [shards.get(name) for name in set(places.values())]
    known = [shard for shard in named if shard is not None and shard.readable]
    if total is None or len(known) < len(named):
        return
    tensors, files = sum(sum(shard.tensors.values()) for shard in known), sum(shard.size for shard in known)
    if total not in (tensors, files):
        findings.add("index", INDEX, f"has a total_size of {total} bytes, and the tensors have {tensors}")


def _check_sizes(folder: Path, sizes: dict[str, int], listing: Listing, findings: Findings) -> None:
    """Against what `ls -lh` printed of a good copy: GiB with one decimal, rounded up; then the sum of all files."""
    for name, printed in listing.sizes().items():
        tenths = None if name not in sizes else -(-sizes[name] * 10 // GIB)
        if tenths is not None and tenths != round(printed * 10) and not findings.has("short", "long", file=name):
            kind = "short" if tenths < round(printed * 10) else "long"
            findings.add(kind, name, f"has {tenths / 10}G, and {listing.name} is listed with {printed}G")
    total = -(-sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) // GIB)
    if total != listing.total_gib and not findings.has("missing", "extra", "short", "long"):
        kind = "short" if total < listing.total_gib else "long"
        findings.add(kind, ".", f"all files have {total}G, and {listing.name} is listed with {listing.total_gib}G")


def _check_sums(sums: Sums, progress: Progress, findings: Findings) -> None:
    for line in sums.strange:
        findings.add("corrupted", sums.path.name, f"has a line that is no checksum of a file here: {line[:60]!r}")
    if sums.unavailable:
        findings.not_checked.append(sums.unavailable)
        return
    present = {name: sums.path.parent / name for name in sums.of if (sums.path.parent / name).is_file()}
    for name in sorted(sums.of.keys() - present.keys()):
        findings.add("missing", name, f"is named in {sums.path.name}")
    total, done = sum(path.stat().st_size for path in present.values()), 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress(f"{sums.path.name}: {done / GIB:.1f} of {total / GIB:.1f} GiB")

    for name in present:
        try:
            if not is_same(sums, name, tell):
                findings.add("corrupted", name, f"has another checksum than {sums.path.name} says")
        except OSError as error:
            findings.add("unreadable", name, error.strerror or str(error))
    findings.checked.append(f"{len(present)} checksums of {sums.path.name}")
