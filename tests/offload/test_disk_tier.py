"""Buckets on disk: the same bits as in memory, the planned bytes, named failures, and nothing left behind."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nightly_cases import by_turns
from reference_training import LEAST, UNTIED, trained, trainer_of, weights_in
from shuffled_streams import ShuffledStreams

from llmb.config.offload_plan import Plan
from llmb.config.spec import OutOfCore
from llmb.errors import ConfigError, LaunchError
from llmb.offload.disk.disk_file import DiskFile, buffered_line
from llmb.offload.offload_checkpoint import checkpoint_identity, resume_point, save
from llmb.offload.offload_loop import all_buckets, load_weights
from llmb.offload.pinned_memory import HostSlab
from llmb.offload.trainer import Trainer
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.plan_memory import disk_bytes, host_bytes
from llmb.perfmodel.offload.simulator import simulate

CPU = torch.device("cpu")
ALL = {"disk_params": 7, "disk_states": 7}
ROUNDS = replace(LEAST, update_at="forward", gbs=5, groups_per_round=2, levels="FAIIAF", dtype="bf16")
PLANS = {
    "fp32, some state": replace(LEAST, disk_states=3),
    "fp32, all": replace(LEAST, **ALL),
    "split master weights, all state, over rounds": replace(ROUNDS, disk_states=7),
    "split master weights, all, over rounds": replace(ROUNDS, **ALL),
    "bf16, some of what is not resident": replace(
        LEAST, dtype="bf16", update="stochastic", gbs=3, resident_params=2, resident_states=3, disk_params=2,
        disk_states=3,
    ),
}  # fmt: skip


def in_memory(plan: Plan) -> Plan:
    return replace(plan, disk_params=0, disk_states=0)


def assert_same_weights(first: Trainer, second: Trainer) -> None:
    expected = weights_in(first)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_in(second).items())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file be written beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("plan", "shuffled"), by_turns(PLANS, (False, True)))
def test_a_disk_changes_no_bit_and_transfers_what_was_planned(tmp_path: Path, plan: str, shuffled: bool) -> None:
    on_disk = PLANS[plan]
    usual = trainer_of(UNTIED, in_memory(on_disk))
    trainer = trainer_of(UNTIED, on_disk, streams=ShuffledStreams(7) if shuffled else None, disk_path=tmp_path)
    assert not list(tmp_path.iterdir())  # a run that is killed now leaves nothing
    counts = []
    for step in range(1, 5):
        trainer.step(step)
        trainer.wait()
        counts.append((trainer.disk.file.bytes_read, trainer.disk.file.bytes_written))
    trainer.flush_updates("nothing")
    for step in range(1, 5):
        usual.step(step)
    usual.flush_updates("nothing")
    assert_same_weights(usual, trainer)
    expected = simulate(UNTIED, on_disk, NOMINAL_CPU)
    (read, written), (read_before, written_before) = counts[3], counts[2]
    assert (read - read_before, written - written_before) == (expected.disk_read_bytes, expected.disk_write_bytes)
    assert written > 0
    assert trainer.disk.file.size == sum(disk_bytes(UNTIED, on_disk).values())
    assert trainer.host_bytes == sum(host_bytes(UNTIED, on_disk, expected.host_slots).values())


def test_losses_are_the_same_and_a_run_resumes_from_disk_or_memory(tmp_path: Path) -> None:
    plan = PLANS["split master weights, all, over rounds"]
    straight = trainer_of(UNTIED, in_memory(plan))
    losses, norms = trained(straight, 4)
    first = trainer_of(UNTIED, plan, disk_path=tmp_path)
    assert trained(first, 2) == (losses[:2], norms[:2])
    work = OutOfCore(seqlen=plan.seqlen, host_gib=1.0, device_gib=1.0, steps=4, resume=str(tmp_path))
    identity = checkpoint_identity(UNTIED, plan, work, None)
    save(tmp_path, 2, all_buckets(first), identity)
    for other in (plan, in_memory(plan), replace(plan, disk_params=0, disk_states=2, resident_params=3)):
        trainer = trainer_of(UNTIED, other, disk_path=tmp_path)
        load_weights(trainer, resume_point(work, tmp_path / "next", identity))
        assert trained(trainer, 4, first=3) == (losses[2:], norms[2:])
        assert_same_weights(straight, trainer)


def test_initial_weights_are_those_in_memory(tmp_path: Path) -> None:
    plan = replace(LEAST, disk_params=4)
    trainers = [trainer_of(UNTIED, each, initial=True, disk_path=tmp_path) for each in (plan, in_memory(plan))]
    assert_same_weights(*trainers)


def test_a_file_system_without_o_direct_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def without_direct(path: str, flags: int, mode: int = 0o777, **options) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", without_direct)
    assert buffered_line(tmp_path).startswith(f"{tmp_path} does not take O_DIRECT")
    file, memory = DiskFile(tmp_path, 1 << 14), HostSlab(1 << 13, CPU).memory
    assert file.mode == "buffered"
    file.write(memory.fill_(7), 1 << 13)
    file.read(memory.zero_(), 1 << 13)
    assert (memory == 7).all()


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path: Path) -> None:
    with largest_file(1 << 14), pytest.raises(LaunchError, match=r"cannot reserve .* in .*: File too large"):
        trainer_of(UNTIED, replace(LEAST, **ALL), disk_path=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_ends_the_run_by_its_name(tmp_path: Path) -> None:
    trainer = trainer_of(UNTIED, replace(LEAST, **ALL), disk_path=tmp_path)
    with (
        largest_file(1 << 12),
        pytest.raises(LaunchError, match=r"cannot write .* of the disk tier in .*: File too la"),
    ):
        trained(trainer, 3)


def test_a_file_that_became_shorter_ends_the_run_by_its_name(tmp_path: Path) -> None:
    trainer = trainer_of(UNTIED, replace(LEAST, **ALL), disk_path=tmp_path)
    trained(trainer, 1)
    os.ftruncate(trainer.disk.file._descriptor, 1 << 12)
    with pytest.raises(LaunchError, match=r"cannot read .*: it ends at \d+ of \d+ bytes"):
        trainer.step(2)


@pytest.mark.parametrize(
    ("folder", "message"),
    [(None, "name a folder there: --set disk_path=FOLDER"), ("missing", "is no folder that can be written")],
)
def test_a_plan_without_its_folder_is_refused(tmp_path: Path, folder: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(UNTIED, replace(LEAST, disk_states=1), disk_path=None if folder is None else tmp_path / folder)


def test_too_little_free_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(
        ConfigError, match=r"keeps 0\.00 GiB on disk, and .* has 0\.00 GiB free; name another disk_path"
    ):
        trainer_of(UNTIED, replace(LEAST, disk_states=1), disk_path=tmp_path)
