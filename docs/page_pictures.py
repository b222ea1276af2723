"""Write the screenshots of docs/report.md: proxies are trained and served here, and their pages opened in Chromium.

python docs/page_pictures.py docs/pictures            two minutes on two cores
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from headless_browser import HeadlessBrowser  # noqa: E402

PROXY = "--scale 1 --proxy"
RUNS = {
    "report_training": (f"submit -w pretrain_llama3.1 -s 8b --dtype fp32 {PROXY} -p --set steps=60", 1680),
    "report_serving": (f"submit -w inference_llama3.1 -s 8b --dtype bf16 {PROXY}", 1760),
}
WIDTH = 1200


def main(folder: Path) -> None:
    """Run each command, and picture the page whose path is the last line that it prints."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "LLMB_INSTALL": scratch}
        with HeadlessBrowser(Path(scratch) / "chromium") as browser:
            for name, (arguments, height) in RUNS.items():
                command = [sys.executable, "-m", "llmb.cli.llmb_run", *arguments.split()]
                run = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
                page = Path(run.stdout.splitlines()[-1].removeprefix("report: "))
                visit = browser.open(page, width=WIDTH)
                assert visit.problems == [], visit.problems
                browser.screenshot(folder / f"{name}.png", WIDTH, height)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
