"""Write the table of campaigns into docs/reliability.md, from what the tests counted:

LLMB_CAMPAIGN_COUNTS=docs/campaigns.json pytest -m "nightly and not gpu"      as `make test-all` does
python docs/campaigns.py
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COUNTS, PAGE = FOLDER / "campaigns.json", FOLDER / "reliability.md"
BEGIN, END = "<!-- campaigns: written by docs/campaigns.py -->\n", "<!-- end of campaigns -->\n"


def table(counts: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return a row for each campaign: how many cases ran, and how many of them in tests that passed."""
    lines = ["| campaign | cases | in tests that passed | tests | last run | commit |", "|---|---|---|---|---|---|"]
    for name, tests in sorted(counts.items()):
        ran = sum(test["cases"] for test in tests.values())
        passed = sum(test["cases"] for test in tests.values() if test["passed"])
        files = ", ".join(f"`{file}`" for file in sorted({node.partition("::")[0] for node in tests}))
        days, commits = ({test[key] for test in tests.values()} for key in ("date", "commit"))
        period = " to ".join(dict.fromkeys((min(days), max(days))))
        lines.append(f"| {name} | {ran:,} | {passed:,} | {files} | {period} | {', '.join(sorted(commits))} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, counts: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the page with the table between its marks."""
    before, _, remainder = page.partition(BEGIN)
    _, _, after = remainder.partition(END)
    return before + BEGIN + "\n" + table(counts) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(COUNTS.read_text())))
