"""Secrets in the files of a run: none is packed, and nothing else is scrubbed."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from archive_contents import anything, content, decompress, some
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.launch.archive.pack import write_archive
from llmb.launch.archive.scrub_files import scrub_json
from llmb.launch.secrets import scrub_thoroughly

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
word = st.text(LETTERS, min_size=36, max_size=50)
token = st.one_of(
    word.map(lambda w: f"hf_{w}"),
    word.map(lambda w: f"ghp_{w}"),
    word.map(lambda w: f"nvapi-{w}"),
    word.map(lambda w: "AKIA" + w.upper()[:16]),
    word.map(lambda w: f"eyJ{w[:12]}.{w[12:24]}.{w[24:]}"),
    word.map(lambda w: f"-----BEGIN RSA PRIVATE KEY-----\n{w}\n{w[::-1]}\n-----END RSA PRIVATE KEY-----"),
)
names = st.sampled_from(
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "my_secret",
        "api-key",
        "accessToken",
        "passwd",
    ]
)
secret_word = st.text(LETTERS + "!#%+-./:@^_~", min_size=8, max_size=30).filter(
    lambda w: re.search("[A-Za-z]{3}", w) and w[0].isalpha() and "***" not in w
)
assignments = st.sampled_from(
    ["{n}={s}", "export {n}='{s}'", '"{n}": "{s}"', "{n}: {s}", "'{n}': '{s}'", "--{n} {s}", '{{\\"{n}\\": \\"{s}\\"}}']
)


@pytest.mark.slow
@given(secret=token, before=anything, after=anything)
@some
def test_token_is_never_packed(run, before, secret, after):
    tail = " " if after[:1].isalnum() or after[:1] in "_-." else ""
    (run.path / "notes.txt").write_text(before + secret + tail + after, newline="", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        summary = write_archive([run], Path(folder) / "a.tar.zst", {})
        packed = decompress(summary.output)
    for line in secret.split("\n"):
        if not line.startswith("-----") and line not in before + after:
            assert line.encode() not in packed


@pytest.mark.slow
@given(name=names, secret=secret_word, assignment=assignments, before=anything, after=anything)
@some
def test_secret_after_its_name_is_never_packed(run, name, secret, assignment, before, after):
    (run.path / "notes.txt").write_text(
        f"{before}\n{assignment.format(n=name, s=secret)}\n{after}", newline="", encoding="utf-8"
    )
    with tempfile.TemporaryDirectory() as folder:
        files = content(write_archive([run], Path(folder) / "a.tar.zst", {}).output)
    (notes,) = [text for path, text in files.items() if path.endswith("notes.txt")]
    assert secret.encode() not in notes.replace(before.encode(), b"").replace(after.encode(), b"")


@pytest.mark.slow
@given(secret=st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=6, max_size=30), at=st.data())
@some
def test_secret_of_the_environment_is_never_packed(run, secret, at):
    text = at.draw(anything) + secret + at.draw(anything)
    notes = json.dumps({"value": secret}) + "\n" + text
    for path in (run.path / "notes.txt", run.log):
        path.write_text(notes, newline="", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        summary = write_archive([run], Path(folder) / "a.tar.zst", {"SOME_KEY": secret})
        files = {n.rpartition("/")[2]: text for n, text in content(summary.output).items()}
    for name in ("notes.txt", run.log.name):
        if name in files and "*" not in secret:
            assert not [s for line in secret.splitlines() if len(s := line) >= 6 and s.encode() in files[name]]


def test_secret_that_is_part_of_the_name_of_a_needed_file_stops_no_archive(run, tmp_path):
    files = content(write_archive([run], tmp_path / "a.tar.zst", {"SOME_KEY": "config"}).output)
    assert any(path.endswith("/config.json") for path in files)


def test_secret_named_in_one_file_is_scrubbed_from_another(run, tmp_path):
    value = "0123456789abcdef0123456789abcdef01234567"
    (run.path / "settings.txt").write_text(f"WANDB_API_KEY={value}\n")
    run.log.write_text(f"login as ...{value}...\n")
    assert value.encode() not in decompress(write_archive([run], tmp_path / "a.tar.zst", {}).output)


def test_private_key_is_not_split_over_chunks(run, tmp_path, monkeypatch):
    monkeypatch.setattr("llmb.launch.archive.scrub_files.CHUNK_BYTES", 64)
    key = "\n".join(
        ["-----BEGIN PRIVATE KEY-----", *["QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="] * 20, "-----END PRIVATE KEY-----"]
    )
    run.log.write_text(f"first\n{key}\nlast\n")
    (log,) = [v for k, v in content(write_archive([run], tmp_path / "a.tar.zst", {}).output).items() if "/log-" in k]
    assert log == b"first\n***\nlast\n"


# Text with misleading names, quotes and brackets.
misleading = st.lists(
    st.sampled_from([*"=:'\"\\{]$@,\n a*", "HF_TOKEN", "key", "--api-key", "***", "http://", "hf_" + "a1" * 11, "b7"]),
    max_size=12,
).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | misleading,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | misleading, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(json_values, st.sampled_from([None, 2]))
@settings(max_examples=300, deadline=None)
def test_scrubbed_json_is_valid_and_scrubbing_is_idempotent(value, indent):
    clean = scrub_json(json.dumps(value, indent=indent), scrub_thoroughly)
    json.loads(clean)
    assert "hf_a1" not in clean
    assert scrub_json(clean, scrub_thoroughly) == clean


@pytest.mark.parametrize(
    "text",
    [
        '"num_key_value_heads": 8, "kv_heads": 1, "first_token": 12.5, "first_token": null, "first_token": [1.2]',
        "time per output token: 12.3ms, tokens: 100, MAX_NUM_TOKENS=8192",
        "KeyError: 'model'",
        "HF_TOKEN: '***'",
        "NCCL_DEBUG=INFO TOKENIZERS_PARALLELISM=false",
    ],
)
def test_numbers_and_ordinary_words_are_not_scrubbed(text):
    assert scrub_thoroughly(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("DB_PASSWORD=hunter2 and more", "DB_PASSWORD=***"),
        ("run with API_KEY=12345678, TP=2", "run with API_KEY=***, TP=2"),
        ('{"password": 1234, "a": 1}', '{"password": "***", "a": 1}'),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: '***'"),
        ('["--api-key",\n  "mine"]', '["--api-key",\n  "***"]'),
        ("export A_SECRET='it'\"'\"'s'", "export A_SECRET='***'"),
        ("clone https://me:pass@host/x", "clone https://***@host/x"),
        ("GET /v1?api_key=mine&x=1", "GET /v1?api_key=***&x=1"),
    ],
)
def test_only_the_value_after_a_name_is_scrubbed(text, clean):
    assert scrub_thoroughly(text) == clean


def test_user_names_are_scrubbed_only_with_anonymous(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "alice")
    run.log.write_text("/home/bob/data /lustre/alice/runs /lustre/alice2 malice\n")

    def log(**options) -> bytes:
        output = tmp_path / f"{len(options)}.tar.zst"
        return next(v for k, v in content(write_archive([run], output, {}, **options).output).items() if "/log-" in k)

    assert log() == run.log.read_bytes()
    assert log(anonymous=True) == b"/home/anonymous/data /lustre/anonymous/runs /lustre/alice2 malice\n"
