"""Runs one of Slurm's programs with a time limit, and tells an answer from a Slurm that is away.

Slurm may be down for a while, or overloaded: every caller must expect SlurmDown and keep what it knows. Questions are
asked without the user's own settings (SQUEUE_STATES, SCANCEL_INTERACTIVE, ...), and times come as seconds since 1970.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmb.errors import LaunchError

QUESTION_S = 30.0  # a busy controller answers late; a dead one is noticed by Slurm's own, shorter limits
USERS_OWN = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
AWAY = (
    "unable to contact slurm controller",
    "unable to establish controller",
    "connection refused",
    "connection reset",
    "connect failure",
    "connection failure",
    "socket timed out",
    "temporarily unable",
    "standby mode",
    "zero bytes",
    "authentication",  # munge is down, or the clocks differ
    "munge",
    "could not establish a configuration source",
    "problem talking to the database",
    "unable to contact slurmdbd",
    "sending message to slurmdbd",
)


class SlurmDown(LaunchError):
    """Slurm does not answer, now. What it last said may still be true."""


class Answer(NamedTuple):
    """What a program of Slurm's said."""

    code: int
    out: str
    error: str  # in one line, without the program's name

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def call(command: Sequence[str], environment: Mapping[str, str] | None = None, limit_s: float = QUESTION_S) -> Answer:
    """Run it; SlurmDown if it is not installed, takes too long, or finds nobody to ask."""
    settings = _plain_settings() if environment is None else dict(environment)
    program = command[0]
    try:
        done = subprocess.run(
            command, env=settings, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, errors="replace"
        )
    except FileNotFoundError as error:
        raise SlurmDown(f"Slurm is not installed on this machine: no program {program}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmDown(f"Slurm does not answer: {program} took more than {limit_s:g} s") from error
    except OSError as error:
        raise SlurmDown(f"cannot run {program}: {error.strerror}") from error
    answer = Answer(done.returncode, done.stdout, _one_line(program, done.stderr))
    if answer.code and any(word in answer.error.lower() for word in AWAY):
        raise SlurmDown(f"Slurm does not answer: {answer.error}")
    return answer


def fail(command: Sequence[str], answer: Answer) -> SlurmDown:
    """For an answer that is neither what was asked for nor a known refusal."""
    return SlurmDown(f"Slurm does not answer: {command[0]} exit {answer.code}: {answer.error or answer.out.strip()}")


def _plain_settings() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(USERS_OWN)}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}


def _one_line(program: str, text: str) -> str:
    lines = [line.removeprefix(f"{program}: ").removeprefix("error: ").strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
