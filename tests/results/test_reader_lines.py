"""Lines out of anything a log file may hold."""

import tracemalloc

import pytest

from llmb.errors import ConfigError
from llmb.results.readers.log_lines import BLOCK_BYTES, LINE_BYTES, Line, clean, file_lines, tail_lines


def lines_of(tmp_path, content: bytes) -> list[Line]:
    path = tmp_path / "log"
    path.write_bytes(content)
    return list(clean(file_lines(path)))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("[rank3]: hello", Line(3, "hello")),
        ("[rank3]:   File x", Line(3, "  File x")),
        (" 12: hello", Line(12, "hello")),
        ("[7] NCCL INFO", Line(7, "NCCL INFO")),
        ("[default5]:hello", Line(5, "hello")),
        ("3: [rank3]: hello", Line(3, "hello")),
        ("[Rank 0] (after 1 iterations)", Line(0, "[Rank 0] (after 1 iterations)")),
        (" [2025-12-19 10:49:15] iteration", Line(0, " [2025-12-19 10:49:15] iteration")),
        ("\x1b[31mstep: \x1b[0m10\x1b[K", Line(0, "step: 10")),
        ("12\x00.39\x07", Line(0, "12.39")),
        (b"caf\xe9 1", Line(0, "caf\ufffd 1")),
    ],
)
def test_ranks_colours_and_garbage_come_off(raw, expected):
    assert list(clean([raw])) == [expected]


def test_carriage_returns_end_lines_and_blank_lines_go(tmp_path):
    assert [line.text for line in lines_of(tmp_path, b"a\rb\r\nc\n\n\n  \n3: \nd\n")] == ["a", "b", "c", "d"]


def test_the_last_word_of_an_unfinished_line_goes(tmp_path):
    """12.3 may be the beginning of 12.39, and nobody can tell."""
    assert [line.text for line in lines_of(tmp_path, b"time: 12.39 | time: 12.3")] == ["time: 12.39 | time: "]
    assert [line.text for line in lines_of(tmp_path, b"time: 12.39\n")] == ["time: 12.39"]


def test_an_endless_line_is_cut_and_what_follows_is_read(tmp_path):
    content = b"start " + b"x" * (3 << 20) + b"\nafter\n"
    first, second = lines_of(tmp_path, content)
    assert len(first.text) == LINE_BYTES
    assert second.text == "after"


def test_an_endless_line_may_begin_and_end_anywhere(tmp_path):
    block = BLOCK_BYTES
    for length in (block - 1, block, block + 1, 2 * block - 7, 2 * block):
        texts = [line.text for line in lines_of(tmp_path, b"a" * length + b"\nafter\n")]
        assert [len(texts[0]), *texts[1:]] == [LINE_BYTES, "after"]


@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as log:
        for _ in range(10):
            log.write((b"a line of text" * 10 + b"\n") * 7_000)
    tracemalloc.start()
    count = sum(1 for _ in file_lines(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 70_000
    assert peak < 5 << 20


def test_lines_with_a_word_are_found_wherever_blocks_end(tmp_path):
    path = tmp_path / "log"
    for length in range(BLOCK_BYTES - 12, BLOCK_BYTES + 3):
        path.write_bytes(
            b"x" * 99 + b"\n" + b"y\n" * ((length - 100) // 2) + b"-" * (length % 2) + b"a step\nb\nA\x1b[0m step\n"
        )
        lines = list(file_lines(path).having([b"step", b"A step"], lambda: False))
        assert [line.lstrip(b"-") for line in lines] == [b"a step", b"A step"]


def test_lines_after_a_word_are_read_while_the_reader_needs_them(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"no\n" + b"begin\n" + b"middle\n" * 100_000 + b"begin end\n" + b"no\n" * 3 + b"begin\nlast\n")
    seen: list[bytes] = []
    for line in file_lines(path).having([b"begin"], lambda: bool(seen) and b"end" not in seen[-1]):
        seen.append(line)
    assert seen == [b"begin", *[b"middle"] * 100_000, b"begin end", b"begin", b"last"]


def test_the_tail_of_a_file(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * 100_000 + b"last\n")
    tail = list(tail_lines(path))
    assert tail[-1] == b"last"
    assert len(tail) < 40_000


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        list(file_lines(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        list(file_lines(tmp_path))
