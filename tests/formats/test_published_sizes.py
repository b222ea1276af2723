"""llmb-install verify: sizes of published folders of weights."""

import json
import os
from pathlib import Path

import pytest
from weight_problems import problems_of, verify

from llmb.formats.published_sizes import PublishedSizes, published_sizes
from llmb.formats.weight_folder import INDEX, check_folder
from llmb.perfmodel.hardware import GIB


def hollow(path: Path, size: int) -> None:
    """A shard whose data is a hole, which takes no room."""
    header = json.dumps({path.name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)


def as_listed(folder: Path, listing: PublishedSizes) -> None:
    """Files of the listed sizes; a little less each, as `ls` rounds up."""
    sizes = listing.sizes()
    less = (sum(sizes.values()) - listing.total_gib + 0.3) / len(sizes)
    assert 0 < less < 0.1
    folder.mkdir()
    for name, printed in sizes.items():
        hollow(folder / name, round((printed - less) * GIB))
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: name for name in sizes}}))


@pytest.mark.parametrize(("like", "shards"), [("fp4", 80), ("fp8", 163)])
def test_published_sizes_are_checked(like, shards, tmp_path):
    listing = published_sizes()[like]
    assert len(listing.sizes()) == listing.shards == shards
    folder = tmp_path / listing.name
    as_listed(folder, listing)
    report = check_folder(folder, listing)
    assert (report.problems, report.shards) == ([], shards)
    assert report.checked[-1] == f"sizes of {listing.name}"
    short, gone = list(listing.sizes())[1:3]
    os.truncate(folder / short, 3 * GIB)
    (folder / gone).unlink()
    assert sorted(problems_of(check_folder(folder, listing))) == [("missing", gone), ("short", short)]


def test_shard_with_a_valid_header_and_an_unpublished_size(tmp_path):
    listing = published_sizes()["fp4"]
    folder = tmp_path / "w"
    as_listed(folder, listing)
    name = list(listing.sizes())[4]
    hollow(folder / name, 4 * GIB)
    report = check_folder(folder, listing)
    assert problems_of(report) == [("short", name)]
    assert report.problems[0].message == "has 4.1G, and DeepSeek-R1-FP4 is listed with 5.0G"


def test_published_sizes_are_chosen_by_name_or_option(folder, tmp_path, capsys):
    named = folder.rename(tmp_path / "nvidia--deepseek-r1-fp4")
    code, lines = verify(capsys, named)
    assert code == 1
    assert "checked: 3 headers, model.safetensors.index.json, sizes of DeepSeek-R1-FP4" in lines
    assert sum(line.startswith("missing") for line in lines) == 80
    assert verify(capsys, named, "--like", "none")[0] == 0
    code, lines = verify(capsys, named, "--like", "fp8")
    assert (code, sum(line.startswith("missing") for line in lines)) == (1, 163)


def test_wrong_total_with_right_shards(tmp_path):
    listing = published_sizes()["fp8"]
    as_listed(tmp_path / "w", listing)
    for name, printed in listing.sizes().items():
        hollow(tmp_path / "w" / name, round((printed - 0.01) * GIB))
    report = check_folder(tmp_path / "w", listing)
    assert problems_of(report) == [("long", ".")]
    assert "is listed with 642G" in report.problems[0].message


def test_published_sizes_are_the_printed_ones():
    fp4, fp8 = published_sizes()["fp4"].sizes(), published_sizes()["fp8"].sizes()
    assert sum(fp4.values()) == pytest.approx(395.3)
    assert sum(fp8.values()) == pytest.approx(656.1)
    assert fp4["model-00080-of-00080.safetensors"] == 1.8
    assert fp8["model-00163-of-000163.safetensors"] == 6.2
