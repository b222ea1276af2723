"""Runs the HTTP server of `llmb-run serve`: its lines go to the terminal and to the log, without secrets.

The server is the leader of a session of its own, so that Ctrl-C reaches llmb-run alone, which forwards it as SIGTERM;
the kernel sends the same if llmb-run itself is killed. What the server does with it: `llmb/serve/http/http_server.py`.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError, LaunchError
from llmb.launch.command import engine_environment, job_script
from llmb.launch.engine_log import open_log
from llmb.launch.local import INTERRUPT_SIGNALS
from llmb.launch.run_files.pid_file import write_pid_file
from llmb.launch.run_folder import RunFolder, printable_path
from llmb.launch.secrets import scrub, secret_values

SERVER_MODULE = "llmb.serve.http"
PR_SET_PDEATHSIG = 1


def server_command(run_folder: RunFolder, arguments: Sequence[str]) -> list[str]:
    """Return the command of the server, from inside its run folder."""
    return [sys.executable, "-m", SERVER_MODULE, run_folder.config.name, *arguments]


def run_server(
    config: RunConfig, run_folder: RunFolder, arguments: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Run the server until it ends; return its exit code. `environment`: secrets to keep out of log and terminal."""
    command = server_command(run_folder, arguments)
    settings = engine_environment(config, os.environ, {})
    settings.pop("OMP_NUM_THREADS", None)  # the server divides the cores among its engines
    run_folder.write_job_script(job_script(command, settings, run_folder))
    secrets = secret_values({**os.environ, **environment})
    previous = {number: signal.getsignal(number) for number in INTERRUPT_SIGNALS}
    try:
        log_file = open_log(run_folder.log)
    except OSError as error:
        raise LaunchError(f"cannot write {printable_path(run_folder.log)}: {error.strerror}") from error
    with open(log_file, "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=run_folder.work,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=terminate_with_parent(),
        )
        try:
            for number in INTERRUPT_SIGNALS:
                signal.signal(number, lambda _number, _frame: _terminate(process))
            write_pid_file(run_folder, process.pid)
            assert process.stdout is not None
            for line in process.stdout:
                text = scrub(line.decode(errors="replace"), secrets)
                log.write(text)
                log.flush()
                with suppress(BrokenPipeError):
                    print(text, end="", flush=True)
            return _exit_code(process.wait())
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            _terminate(process)


def terminate_with_parent() -> Callable[[], None]:
    """Return a function for a new process to call, after which the kernel ends it by SIGTERM when its parent dies."""
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec little is safe

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return request_signal


def check_api_key_variable(name: str | None) -> None:
    """Raise a ConfigError if the variable that should hold the API key is not set."""
    if name is not None and not os.environ.get(name, "").strip():
        raise ConfigError(f"--api-key-env {name}: this environment variable is not set, or empty")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()


def _exit_code(code: int) -> int:
    return code if code >= 0 else 2  # killed by a signal
