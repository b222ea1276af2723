"""The HTTP process does without torch: it starts fast, and its memory is small."""

import subprocess
import sys


def test_http_process_does_not_import_torch():
    code = "import sys, llmb.serve.http.http_server, llmb.serve.http.__main__; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
