"""The public names are exactly those of docs/api.md, documented and typed, and cost nothing until they are used."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import llmb

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
LISTED = re.findall(r"^\| `llmb\.(\w+)", DOCUMENT, re.M)
FUNCTIONS = ("compare", "load", "predict", "resolve", "run", "runs")


def test_public_names_are_those_of_the_document():
    assert sorted(LISTED) == sorted(llmb.__all__)
    assert dir(llmb) == sorted(llmb.__all__)


@pytest.mark.parametrize("name", sorted(set(LISTED) - {"__version__"}))
def test_each_name_is_documented(name):
    assert inspect.getdoc(getattr(llmb, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_typed_and_documented_with_their_parameters(name):
    function = getattr(llmb, name)
    parameters = inspect.signature(function).parameters
    assert get_type_hints(function).keys() == {*parameters, "return"}
    (listed,) = re.findall(rf"^\| `llmb\.{name}\((.*?)\)`", DOCUMENT, re.M)
    names = [word.strip("* ").partition("=")[0] for word in listed.split(",") if word.strip("* ")]
    assert names == list(parameters)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'llmb' has no attribute 'resolv'"):
        _ = llmb.resolv


def test_import_loads_no_other_module_and_a_configuration_no_torch():
    code = (
        "import sys, llmb\n"
        "print(sorted(name for name in sys.modules if name.startswith('llmb')))\n"
        "config = llmb.resolve('pretrain_llama3.1', size='8b', dtype='fp32', gpus=1, proxy=True)\n"
        "llmb.predict(config), llmb.runs(), llmb.run, llmb.compare\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split("\n")[:2] == ["['llmb']", "False"]
