"""Pictures that `make docs` writes: the README shows them, and they load nothing from elsewhere."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def terminal_picture():
    spec = importlib.util.spec_from_file_location("terminal_picture", ROOT / "docs" / "terminal_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_the_page_and_the_terminal():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert {"docs/pictures/report_training.png", "docs/pictures/terminal.svg"} <= set(pictures)
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_the_terminal_is_drawn_with_its_colours_and_loads_no_font():
    drawn = terminal_picture().svg("$ llmb-run jobs\nL1  \x1b[32mok\x1b[0m\n" + "x" * 80)
    texts = [element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "x" * 80 in texts
    assert any(re.search(r'class="llmb-r(\d)"[^>]*>ok<', line) for line in drawn.splitlines())
    assert "url(http" not in drawn


def test_the_stored_picture_shows_no_folder_of_this_machine():
    drawn = (ROOT / "docs" / "pictures" / "terminal.svg").read_text()
    assert "~/.llmb/runs/L1" in drawn
    assert "/tmp" not in drawn
