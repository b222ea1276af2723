"""llmb-install verify: each kind of damage to a real folder of weights is named, and a good folder passes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import llama_model
from weight_problems import SHARD, problems_of, verify

from llmb.cli.install.llmb_install import main
from llmb.formats.safetensors_header import read_shard_header
from llmb.formats.weight_folder import INDEX, check_folder

Damage = Callable[[Path], object]


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

    from llmb.models.architectures import build_model
    from llmb.models.hf_weights import save_weights

    network = build_model(llama_model(hidden=64, ffn=96, heads=2, kv_heads=1, vocab=64))
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


def test_module_imports_without_torch():
    heavy = "('torch', 'numpy', 'safetensors')"
    code = f"import sys, llmb.formats.weight_folder; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
