"""Run a Slurm command with a timeout, and tell an error of the command from a Slurm that is unavailable.

Slurm may be down for a while, or overloaded: every caller must expect SlurmUnavailable and keep the last known state.
Queries run without the user's own settings (SQUEUE_STATES, SCANCEL_INTERACTIVE, ...), with times in seconds since 1970.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmb.errors import LaunchError

QUERY_TIMEOUT_S = 30.0  # a busy controller responds late; a dead one is noticed by Slurm's own, shorter timeouts
USER_SETTINGS = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
UNAVAILABLE_MESSAGES = (
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


class SlurmUnavailable(LaunchError):
    """Slurm does not respond at the moment. The last known state may still be true."""


class SlurmOutput(NamedTuple):
    """Output of a Slurm command."""

    exit_code: int
    stdout: str
    stderr: str  # in one line, without the program's name

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


def run_slurm(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = QUERY_TIMEOUT_S
) -> SlurmOutput:
    """Run a command; SlurmUnavailable if it is not installed, times out, or cannot reach a daemon."""
    settings = _query_environment() if environment is None else dict(environment)
    program = command[0]
    try:
        process = subprocess.run(
            command, env=settings, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, errors="replace"
        )
    except FileNotFoundError as error:
        raise SlurmUnavailable(f"Slurm is not installed on this machine: no program {program}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"Slurm does not respond: {program} took more than {timeout_s:g} s") from error
    except OSError as error:
        raise SlurmUnavailable(f"cannot run {program}: {error.strerror}") from error
    output = SlurmOutput(process.returncode, process.stdout, _one_line(program, process.stderr))
    if output.exit_code and any(message in output.stderr.lower() for message in UNAVAILABLE_MESSAGES):
        raise SlurmUnavailable(f"Slurm does not respond: {output.stderr}")
    return output


def unexpected_output(command: Sequence[str], output: SlurmOutput) -> SlurmUnavailable:
    """Return the error for output that is neither a valid result nor a known refusal."""
    message = output.stderr or output.stdout.strip()
    return SlurmUnavailable(f"Slurm does not respond: {command[0]} exit {output.exit_code}: {message}")


def _query_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(USER_SETTINGS)}
    return {**environment, "SLURM_TIME_FORMAT": "%s"}


def _one_line(program: str, text: str) -> str:
    lines = [line.removeprefix(f"{program}: ").removeprefix("error: ").strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
