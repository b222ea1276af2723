"""At most one local run of an experiment at a time: two would share the GPU and measure each other.

    with running_alone(install, config): ...

It is a kernel lock (flock) on the experiment's .lock file, so it goes when its holder dies, however it dies. A run
whose llmb-run was killed counts as running until its engine has been ended too (see leash.py).
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.launch.run_folder import RunDir, experiment_path, live_pid, lock_path, make_folder, refusal, shown

_NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # Lustre mounted without flock, some network file systems


@contextmanager
def running_alone(install: Path, config: RunConfig) -> Iterator[None]:
    """Hold the experiment's lock, or say who does."""
    experiment = experiment_path(install, config)
    make_folder(experiment)
    with locked(lock_path(experiment)) as free:
        rival = next((run for run in RunDir.of_experiment(experiment) if live_pid(run) is not None), None)
        if rival is not None or not free:
            who = f" (pid {live_pid(rival)}, folder {shown(rival.path)})" if rival else ""
            raise ConfigError(f"{config.name} is already running{who}; wait for it or stop it")
        yield


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock that is this file, made where it is missing; False: someone else holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise refusal(path, error) from error
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
        if error.errno not in _NO_LOCKS_HERE:
            raise refusal(path, error) from error
    return True
