"""Token files: any cut of the work sees the same batch, wrong files are named, and a model learns the shipped text."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import trained as trained_by_ranks
from small_config import CONFIG, changed

from llmb.errors import ConfigError, LaunchError
from llmb.formats.token_file import HEADER, Header, TokenWriter, read_header
from llmb.runtime.token_data import TokenFile

CPU = torch.device("cpu")
DATA = Path(__file__).parent.parent.parent / "data"


def token_file(path: Path, tokens: list[int], vocab: int = 128, end: int | None = None) -> Path:
    with TokenWriter(path, vocab, end) as file:
        file.add(tokens[:7])
        file.add(tokens[7:])
    return path


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """100 tokens, each its own place."""
    return token_file(tmp_path / "tokens.bin", list(range(100)))


@pytest.mark.parametrize(("vocab", "width"), [(128, 2), (65_536, 2), (65_537, 4), (200_000, 4)])
def test_what_is_written_is_read(tmp_path: Path, vocab: int, width: int) -> None:
    tokens = [0, vocab - 1, 5, vocab // 2, 1]
    path = token_file(tmp_path / "tokens.bin", tokens, vocab, end=1)
    assert read_header(path) == Header(vocab=vocab, tokens=5, end=1)
    assert path.stat().st_size == 64 + 5 * width
    assert TokenFile(path).sequences(0, (1, 5), CPU).tolist() == [tokens]


def test_the_layout_on_disk_is_fixed(tmp_path: Path) -> None:
    """Written by hand as the format's description says, so that a change of layout cannot pass unseen."""
    path = token_file(tmp_path / "tokens.bin", [1, 2, 258], vocab=300)
    head = b"LLMBTOKS" + b"\1\0\0\0" + b"\2\0\0\0" + b"\x2c\1" + bytes(6) + b"\3" + bytes(7) + b"\xff" * 8 + bytes(24)
    assert path.read_bytes() == head + b"\1\0\2\0\2\1"


def test_sequences_follow_one_another_and_begin_again(numbered: Path) -> None:
    data = TokenFile(numbered)
    assert data.sequences(0, (2, 9), CPU).tolist() == [list(range(9)), list(range(8, 17))]
    assert data.sequences(12, (1, 9), CPU).tolist() == [[96, 97, 98, 99, 0, 1, 2, 3, 4]]
    epochs = data.sequences(0, (25, 9), CPU)  # 200 labels: each token twice
    assert np.bincount(epochs[:, 1:].flatten()).tolist() == [2] * 100
    assert data.sequences(10**12, (1, 9), CPU)[0, 0] == 8 * 10**12 % 100


def test_every_cut_of_the_batch_sees_the_same_sequences(numbered: Path) -> None:
    data = TokenFile(numbered)
    whole = data.sequences(30, (12, 6), CPU)
    for size in (1, 2, 3, 4, 6):
        parts = [data.sequences(30 + first, (size, 6), CPU) for first in range(0, 12, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert whole.dtype == torch.int64


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token 128 is outside the vocabulary of 128"):
        token_file(tmp_path / "tokens.bin", [1, 2, 3, 4, 5, 6, 7, 128])
    with pytest.raises(KeyboardInterrupt), TokenWriter(tmp_path / "tokens.bin", vocab=128):
        raise KeyboardInterrupt
    with pytest.raises(LaunchError, match="cannot write"), TokenWriter(tmp_path / "no" / "tokens.bin", vocab=128):
        pass
    assert not list(tmp_path.iterdir())


def broken(path: Path, how: str) -> Path:
    whole = path.read_bytes()
    parts = {
        "missing": None,
        "text": b"In the beginning",
        "longer text": b"In the beginning " * 10,
        "short header": whole[: HEADER.size - 1],
        "version": whole[:8] + b"\7" + whole[9:],
        "width": whole[:12] + b"\4" + whole[13:],
        "truncated": whole[:-5],
        "more": whole + b"xx",
        "empty": Header(vocab=128, tokens=0).packed(),
    }
    path.unlink() if parts[how] is None else path.write_bytes(parts[how])
    return path


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "cannot read token file .*: No such file"),
        ("text", "is not a token file; llmb-run tokenize makes one"),
        ("longer text", "is not a token file"),
        ("short header", "is not a token file"),
        ("version", "of version 7; this llmb reads version 1"),
        ("width", "4 bytes a token do not go with a vocabulary of 128"),
        ("truncated", "is truncated: its header says 100 tokens, 97.5 are there"),
        ("more", "has something after its end: its header says 100 tokens, 101 are there"),
        ("empty", "holds no tokens"),
    ],
)
def test_a_wrong_file_is_named(numbered: Path, how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        TokenFile(broken(numbered, how))
    assert str(numbered) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_token_is_named_before_the_model_meets_it(numbered: Path) -> None:
    with numbered.open("r+b") as file:
        file.seek(HEADER.size + 2 * 50)
        file.write(b"\xff\xff")
    data = TokenFile(numbered)
    data.sequences(0, (1, 50), CPU)
    with pytest.raises(ConfigError, match="damaged: token 65535 in a vocabulary of 128"):
        data.sequences(0, (1, 51), CPU)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seqlen": 100}, "has 100 tokens, too few for one sequence of 100 and a label"),
        ({"vocab": 127}, "has a vocabulary of 128, the model one of only 127"),
    ],
)
def test_a_file_that_does_not_fit_ends_the_run_with_one_line(trained, capsys, numbered, changes, said) -> None:
    done = trained(data=str(numbered), **changes)
    assert done.code == 1
    assert done.ended().status == "failed"
    assert said in (done.ended().reason or "")
    assert done.steps() == []


def test_the_loss_depends_on_the_file_and_not_on_the_cut(trained, tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens.bin", [(7 * i * i + 3 * i) % 128 for i in range(3000)])
    at_once = trained(data=str(path), mbs=4, ga=1).losses()
    assert trained(data=str(path), mbs=1, ga=4).losses() == pytest.approx(at_once, rel=1e-5)
    assert trained().losses() != at_once


def test_two_ranks_see_the_batch_of_one(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens.bin", [(7 * i * i + 3 * i) % 128 for i in range(3000)])
    config = changed(CONFIG, data=str(path), ga=2)
    alone = trained_by_ranks(changed(config, mbs=2), tmp_path / "one")
    spread = trained_by_ranks(changed(config, mbs=1, gpus=2, dp=2), tmp_path / "two")
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)


def test_a_small_model_learns_the_shipped_text(trained, llmb_run, tmp_path: Path) -> None:
    tokens = tmp_path / "kjv.bin"
    code, _, err = llmb_run("tokenize", DATA / "kjv.txt", "--tokenizer", DATA / "tokenizer.json", "-o", tokens)
    assert code == 0, err
    assert read_header(tokens).vocab == 4096
    losses = trained(
        data=str(tokens), vocab=4096, hidden=64, ffn=128, head_dim=16, seqlen=128, mbs=8, gbs=8, steps=60, lr=1e-2
    ).losses()
    assert losses[0] == pytest.approx(math.log(4096), rel=0.02)
    share = np.bincount(TokenFile(tokens).sequences(0, (60 * 8, 129), CPU).flatten()) / (60 * 8 * 129)
    frequencies_alone = -sum(p * math.log(p) for p in share if p > 0)
    assert sum(losses[-5:]) / 5 < frequencies_alone - 0.2, "it has learnt which token follows which"
