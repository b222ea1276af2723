"""Lock of an experiment: two local runs at a time would share the GPU and disturb each other's measurement.

    with exclusive_run_lock(install, config): ...

It is a kernel lock (flock) on the experiment's .lock file, so it is released when its holder dies, however it dies. A
run whose llmb-run was killed counts as running until its engine has exited too (see supervisor.py).
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.launch.run_files.pid_file import live_pid
from llmb.launch.run_folder import RunFolder, experiment_path, lock_path, make_folder, printable_path, write_error

_LOCKS_UNSUPPORTED = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.ENOLCK,
)  # Lustre mounted without flock, some network file systems


@contextmanager
def exclusive_run_lock(install: Path, config: RunConfig) -> Iterator[None]:
    """Hold the experiment's lock, or raise a ConfigError that names its holder."""
    experiment = experiment_path(install, config)
    make_folder(experiment)
    with file_lock(lock_path(experiment)) as acquired:
        running = next((run for run in RunFolder.of_experiment(experiment) if live_pid(run) is not None), None)
        if running is not None or not acquired:
            holder = f" (pid {live_pid(running)}, folder {printable_path(running.path)})" if running else ""
            raise ConfigError(f"{config.name} is already running{holder}; wait for it or stop it")
        yield


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Hold a lock on this file, created where it is missing; False: another process holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        yield _lock(descriptor, path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED:
            raise write_error(path, error) from error
    return True
