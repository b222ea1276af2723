"""Links between pages lead somewhere, and the files that pages name exist."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "data" / "README.md", ROOT / "bench" / "RESULTS.md",
    *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("llmb/recipes/*/README.md")),
]  # fmt: skip
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)")
NAMED_FILE = re.compile(r"`((?:llmb|tests|bench|docs|examples|common|data)/[\w./-]+\.\w+)`")


def prose(page: Path) -> Iterator[str]:
    """Yield the lines of a page outside of fenced blocks."""
    is_fenced = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif not is_fenced:
            yield line


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub spells them."""
    titles = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("# ")) for line in prose(page) if line.startswith("#")
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = "\n".join(prose(page))
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
    for path in NAMED_FILE.findall(text):
        assert (ROOT / path).exists(), path


def test_every_page_is_linked_from_the_readme():
    linked = {path for path, _ in LINK.findall((ROOT / "README.md").read_text())}
    assert {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} <= linked
