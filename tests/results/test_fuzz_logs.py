"""Ten thousand damaged logs: whatever happened to a file, reading it raises nothing and ends with a status."""

import csv
import json
import random
import re
from pathlib import Path

import pytest

from llmb.events import RunEnded, StepDone
from llmb.report.step_timing import FORMATS, STYLES, timing_table
from llmb.results.readers.log_lines import file_lines
from llmb.results.readers.reader_choice import READERS, detect, read_log
from llmb.results.timed_run import read_timed_log

GOLDEN = [path.read_bytes() for path in sorted((Path(__file__).parent.parent / "golden" / "logs").iterdir())]
INSERTED = [b"\r", b"\n", b"\x00", b"\x1b[31m", b"\x1b", b"\xff\xfe", b"nan", b"1e999", b"-", b"9" * 400, b"3: ", b"\t"]


def flip(log: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 30)):
        log[chance.randrange(len(log))] = chance.randrange(256)


def cut(log: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(log))
    del log[start : start + chance.choice([1, 10, 100, len(log)])]


def duplicate(log: bytearray, chance: random.Random) -> None:
    start, length = chance.randrange(len(log)), chance.randrange(1, 2000)
    place = chance.randrange(len(log))
    log[place:place] = log[start : start + length]


def insert(log: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 20)):
        place = chance.randrange(len(log))
        log[place:place] = chance.choice(INSERTED)


def shuffle(log: bytearray, chance: random.Random) -> None:
    lines = log.splitlines(keepends=True)
    chance.shuffle(lines)
    log[:] = b"".join(lines)


def mix(log: bytearray, chance: random.Random) -> None:
    second = chance.choice(GOLDEN)
    place = chance.randrange(len(log))
    log[place:place] = second[: chance.randrange(len(second))]


def replace_number(log: bytearray, chance: random.Random) -> None:
    numbers = list(re.finditer(rb"[\d.]+", log))
    if numbers:
        actual = chance.choice(numbers)
        log[actual.start() : actual.end()] = chance.choice(
            [b"0", b"-1", b"1e400", b"inf", b"NaN", b"1" * 5000, b"1,2,3", b"."]
        )


DAMAGES = [flip, cut, duplicate, insert, shuffle, mix, replace_number]


def damaged(chance: random.Random) -> bytes:
    log = bytearray(chance.choice(GOLDEN))
    if len(log) > 6000 and chance.random() < 0.8:  # mostly a part: it fails as readily and is read sooner
        start = chance.randrange(len(log) - 4000)
        log = log[start : start + 4000]
    for _ in range(chance.randrange(1, 4)):
        if log:
            chance.choice(DAMAGES)(log, chance)
    return bytes(log)


def check(content: bytes, folder: Path, chance: random.Random) -> None:
    path = folder / "log.out"
    path.write_bytes(content)
    detect(path)
    for reader in (None, chance.choice(list(READERS))):
        events = list(read_log(path, reader))
        assert [isinstance(event, RunEnded) for event in events].count(True) == 1
        assert isinstance(events[-1], RunEnded)
        for event in events:
            if isinstance(event, StepDone):
                assert event.step >= 1
                assert event.seconds is None or 0 < event.seconds < 1e20
    run, form = read_timed_log(path), chance.choice(list(FORMATS))
    runs, style, window = [run] if run else [], chance.choice(list(STYLES.values())), (2, chance.randrange(2, 50))
    text = FORMATS[form](timing_table(runs, style, folder, {}, window))
    if form == "json":
        json.loads(text)
    elif form == "csv":
        assert {len(row) for row in csv.reader(text.splitlines())} == {10}


@pytest.mark.parametrize("seed", range(3))
def test_a_few_hundred_damaged_logs(tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(100):
        check(damaged(chance), tmp_path, chance)


@pytest.mark.parametrize("reader", ["nemo", "megatron_bridge", "torchtitan", "trtllm", "vllm"])
def test_lines_selected_by_words_give_the_events_of_all_lines(tmp_path, reader):
    """A file is searched for the reader's words; of a list every line is looked at."""
    chance = random.Random(reader)
    contents = [*GOLDEN, b"".join(GOLDEN), *(damaged(chance) for _ in range(40))]
    for content in contents:
        path = tmp_path / "log.out"
        path.write_bytes(content)
        every_line = READERS[reader].read(list(file_lines(path)))
        assert repr(list(READERS[reader].events(path))) == repr(list(every_line)), content  # nan is not itself


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_damaged_logs(tmp_path, seed, campaign):
    campaign("damaged logs", 1000)
    chance = random.Random(1000 + seed)
    for _ in range(1000):
        check(damaged(chance), tmp_path, chance)
