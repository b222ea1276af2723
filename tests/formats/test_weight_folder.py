"""llmb-install verify: each kind of damage to a real folder of weights is named, and a good folder passes."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmb.cli.install.llmb_install import main
from llmb.formats.published_sizes import PublishedSizes, published_sizes
from llmb.formats.safetensors_header import read_shard_header
from llmb.formats.weight_folder import INDEX, FolderReport, check_folder
from llmb.perfmodel.hardware import GIB

SHARD = "model-00002-of-00003.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A small model in three shards, written as published ones are."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("good")
    places, total = {}, 0
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.safetensors"
        tensors = {f"layers.{number}.{item}": torch.full((8, number), number).bfloat16() for item in "abc"}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return folder


@pytest.fixture
def folder(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "weights"))


def problems_of(report: FolderReport) -> list[tuple[str, str]]:
    return [(problem.kind, problem.file) for problem in report.problems]


def verify(capsys, *arguments: object) -> tuple[int, list[str]]:
    code = main(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()


def test_valid_folder(folder, capsys):
    code, lines = verify(capsys, folder)
    assert code == 0
    assert lines == [
        f"{folder}: 3 files of weights, 0.0 GiB",
        f"checked: 3 headers, {INDEX}",
        "problems: none",
    ]


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, change: Callable[[dict], object]) -> None:
    header, data = header_of(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def with_index(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def cut_off(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size + size if size < 0 else size)


def swap_places(folder: Path) -> None:
    """Two tensors change files in the index only."""
    places = {"layers.2.a": "model-00003-of-00003.safetensors", "layers.3.a": SHARD}
    with_index(folder, lambda index: index["weight_map"].update(places))


DAMAGE: dict[str, tuple[Damage, list[tuple[str, str]], str]] = {
    "missing": (lambda f: (f / SHARD).unlink(), [("missing", SHARD)], f"is named in {INDEX}"),
    "extra": (
        lambda f: shutil.copy(f / SHARD, f / "model-00004-of-00003.safetensors"),
        [("extra", "model-00004-of-00003.safetensors")],
        "is not expected in this folder",
    ),
    "short": (lambda f: cut_off(f / SHARD, -5), [("short", SHARD)], "5 bytes too short for the tensors of its header"),
    "short in the header": (lambda f: cut_off(f / SHARD, 20), [("short", SHARD)], "ends within its header"),
    "empty": (lambda f: cut_off(f / SHARD, 0), [("short", SHARD)], "0 bytes hold no header"),
    "long": (
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"1234567"),
        [("long", SHARD)],
        "7 bytes too long",
    ),
    "pointer": (
        lambda f: (f / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
        [("short", SHARD)],
        "git lfs pull",
    ),
    "not safetensors": (
        lambda f: (f / SHARD).write_bytes(b"PK\3\4" * 100),
        [("corrupted", SHARD)],
        "does not begin like a safetensors file",
    ),
    "header not JSON": (
        lambda f: (f / SHARD).write_bytes((4).to_bytes(8, "little") + b"{{{{"),
        [("corrupted", SHARD)],
        "its header is not one of a safetensors file",
    ),
    "header without places": (
        lambda f: with_header(f / SHARD, lambda header: header["layers.2.a"].pop("data_offsets")),
        [("corrupted", SHARD)],
        "its header is not one of a safetensors file",
    ),
    "tensor of another size": (
        lambda f: with_header(f / SHARD, lambda header: header["layers.2.b"].update(shape=[9, 2])),
        [("corrupted", SHARD)],
        "1 tensor (layers.2.b) with another number of bytes than their shape has",
    ),
    "overlap": (
        lambda f: with_header(f / SHARD, lambda header: header["layers.2.b"].update(data_offsets=[0, 32])),
        [("corrupted", SHARD)],
        "over another's bytes",
    ),
    "tensor gone from the shard": (
        lambda f: with_header(f / SHARD, lambda header: header.update(other=header.pop("layers.2.c"))),
        [("corrupted", SHARD), ("corrupted", SHARD)],
        "lacks 1 tensor (layers.2.c) that the index places there",
    ),
    "tensor not in the index": (
        lambda f: with_index(f, lambda index: index["weight_map"].pop("layers.2.a")),
        [("corrupted", SHARD)],
        "has 1 tensor (layers.2.a) that the index does not place there",
    ),
    "tensors in other files": (
        swap_places,
        [("corrupted", SHARD)] * 2 + [("corrupted", "model-00003-of-00003.safetensors")] * 2,
        "lacks 1 tensor (layers.3.a) that the index places there",
    ),
    "total": (
        lambda f: with_index(f, lambda index: index["metadata"].update(total_size=5)),
        [("index", INDEX)],
        "has a total_size of 5 bytes, and the tensors have 288",
    ),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), [("corrupted", INDEX)], "cannot be read as JSON"),
    "index of other folders": (
        lambda f: with_index(f, lambda index: index["weight_map"].update({"layers.2.a": "../x"})),
        [("corrupted", INDEX)],
        "has no weight_map",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), [("missing", INDEX)], "is needed for several files"),
    "no index and a number left out": (
        lambda f: ((f / INDEX).unlink(), (f / SHARD).unlink()),
        [("missing", INDEX), ("missing", SHARD)],
        "is one of a series that is here",
    ),
    "link to nothing": (
        lambda f: ((f / SHARD).unlink(), (f / SHARD).symlink_to(f / "gone")),
        [("missing", SHARD)],
        "is a link to a file that is not there",
    ),
    "folder instead of a file": (
        lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()),
        [("unreadable", SHARD)],
        "Is a directory",
    ),
}


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 80) | st.floats() | st.sampled_from(["U8", "BF16", "layers.2.a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(header=ANY, data=st.binary(max_size=40))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_handled(header, data, tmp_path):
    path = tmp_path / "model.safetensors"
    for told_header in (header, {"a": header}, {"a": {"dtype": "U8", "shape": header, "data_offsets": [0, 8]}}):
        text = json.dumps(told_header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        shard = read_shard_header(path)
        assert all(kind in ("short", "long", "corrupted") for kind, _ in shard.faults)
        assert shard.faults or sum(shard.tensors.values()) == len(data)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_handled(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "SHA256SUMS").write_bytes(data)
    check_folder(tmp_path)


def test_multi_line_tensor_name_stays_on_one_line(folder, capsys):
    with_header(folder / SHARD, lambda header: header.update({"two\nlines \ud800": header.pop("layers.2.a")}))
    code, lines = verify(capsys, folder)
    assert (code, len(lines)) == (1, 5)
    assert "(two\\nlines \\ud800)" in lines[1]


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_is_reported(kind, folder, capsys):
    damage, problems, message = DAMAGE[kind]
    damage(folder)
    report = check_folder(folder)
    assert problems_of(report) == problems
    assert any(message in problem.message for problem in report.problems)
    code, lines = verify(capsys, folder)
    assert code == 1
    assert len(lines) == len(problems) + 3
    assert lines[-1] == f"problems: {len(problems)}"
    for line, (subject, file) in zip(lines, problems, strict=False):
        assert line.startswith(f"{subject:<10}  {file}: ")


def test_total_size_of_files_is_accepted(folder):
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with_index(folder, lambda index: index["metadata"].update(total_size=size))
    assert not check_folder(folder).problems


def test_single_file_needs_no_index(good, tmp_path):
    shutil.copy(good / SHARD, tmp_path / "model.safetensors")
    report = check_folder(tmp_path)
    assert (report.problems, report.shards) == ([], 1)


def test_folder_written_by_llmb_is_valid(tmp_path):
    import torch

    from llmb.config.spec import Model
    from llmb.models.architectures import build_model
    from llmb.models.hf_weights import save_weights

    small = Model(
        name="small", architecture="llama", layers=2, hidden=64, ffn=96, heads=2, kv_heads=1, head_dim=32, vocab=64
    )
    network = build_model(small)
    network.init_weights(1)
    save_weights(network, tmp_path / "w", torch.bfloat16, 50_000)
    report = check_folder(tmp_path / "w")
    assert not report.problems
    assert report.shards > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["."], "holds no weights: neither model.safetensors nor"),
        ([".", "--like", "fp5"], "unknown list of sizes 'fp5' (did you mean fp8?); choices are: fp4, fp8, none"),
    ],
)
def test_invalid_request_gives_a_one_line_error(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *arguments]) == 1
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)


def test_json_before_or_after_the_command(folder, capsys):
    cut_off(folder / SHARD, -1)
    for arguments in (["verify", str(folder), "--json"], ["--json", "verify", str(folder)]):
        assert main(arguments) == 1
        actual = json.loads(capsys.readouterr().out)
        assert actual["well"] is False
        assert actual["shards"] == 3
        assert actual["problems"] == [
            {"kind": "short", "file": SHARD, "message": "1 bytes too short for the tensors of its header"}
        ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sums(folder: Path, style: str) -> None:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if style == "SHA256SUMS":
        lines = [f"{sha256(folder / name)}  {name}\n" for name in names]
        (folder / style).write_text("".join(lines))
    elif style == "one of each":
        for name in names:
            (folder / f"{name}.sha256").write_text(sha256(folder / name).upper() + "\n")
    else:
        (folder / "all.sha256").write_text("".join(f"{sha256(folder / name)} *./{name}\n" for name in names))


@pytest.mark.parametrize("style", ["SHA256SUMS", "one of each", "binary"])
def test_checksums(style, folder, capsys):
    write_sums(folder, style)
    code, lines = verify(capsys, folder)
    assert code == 0
    assert "checksum" in lines[1]
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)
    code, lines = verify(capsys, folder)
    assert code == 1
    assert len(lines) == 4
    assert lines[0].startswith(f"corrupted   {SHARD}: has another checksum than ")


def test_checksums_of_missing_or_outside_files(folder):
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  tokenizer.json\n{'0' * 64}  ../secret\nnonsense\n# a remark\n\n")
    assert problems_of(check_folder(folder)) == [
        ("corrupted", "SHA256SUMS"),
        ("corrupted", "SHA256SUMS"),
        ("missing", "tokenizer.json"),
    ]


def write_blake3(folder: Path, digest: Callable[[bytes], str]) -> None:
    lines = [f"{digest(path.read_bytes())}  {path.name}\n" for path in sorted(folder.glob("*.safetensors"))]
    (folder / "checksums.blake3").write_text("".join(lines))


def test_unavailable_blake3_is_reported(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    monkeypatch.setattr("llmb.formats.checksums.find_spec", lambda _name: None)
    write_blake3(folder, lambda _data: "0" * 64)
    code, lines = verify(capsys, folder)
    assert code == 0
    assert "not checked: checksums.blake3 (3 files): pip install blake3" in lines
    assert not any("checksums of" in line for line in lines)


def test_blake3_if_installed(folder, monkeypatch):
    """A module of that name with the interface of the package; the arithmetic itself is not ours."""
    monkeypatch.setitem(sys.modules, "blake3", types.SimpleNamespace(blake3=hashlib.sha256))
    monkeypatch.setattr("llmb.formats.checksums.find_spec", lambda _name: object())
    write_blake3(folder, lambda data: hashlib.sha256(data).hexdigest())
    report = check_folder(folder)
    assert (report.problems, report.not_checked) == ([], [])
    assert report.checked[-1] == "3 checksums of checksums.blake3"
    write_blake3(folder, lambda _data: "0" * 64)
    assert problems_of(check_folder(folder)) == [("corrupted", f"model-{n:05}-of-00003.safetensors") for n in (1, 2, 3)]


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


def test_module_imports_without_torch():
    heavy = "('torch', 'numpy', 'safetensors')"
    code = f"import sys, llmb.formats.weight_folder; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
