"""Secrets on the command line do not stay there."""

import subprocess
import sys

CODE = """
import sys
from llmb.launch.process_arguments import hide_arguments
hide_arguments(["hunter2", "pässwort", ""])
print(sys.argv[1:], open("/proc/self/cmdline").read().split("\\0")[3:-1])
"""


def test_secrets_are_overwritten_in_the_command_line_alone():
    command = [sys.executable, "-c", CODE, "--env", "DB_PASS=hunter2", "X=pässwort", "last"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (
        out
        == "['--env', 'DB_PASS=hunter2', 'X=pässwort', 'last'] ['--env', 'DB_PASS=*******', 'X=*********', 'last']\n"
    )
