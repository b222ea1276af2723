"""Every launch of a Triton kernel names arguments that the kernel has: the interpreter would not notice others."""

import ast
from pathlib import Path

import pytest

import llmb.ops

FILES = sorted(Path(llmb.ops.__file__).parent.rglob("*_triton.py"))
OF_THE_LAUNCH = {"num_warps", "num_stages", "num_ctas", "launch_pdl", "enable_fp_fusion"}


def kernels_in(tree: ast.Module) -> dict[str, set[str]]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [one for one in functions if any("jit" in ast.unparse(mark) for mark in one.decorator_list)]
    return {one.name: {argument.arg for argument in one.args.args} for one in jitted}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_launches_name_what_kernels_have(path):
    tree = ast.parse(path.read_text())
    kernels = kernels_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            given = {word.arg for word in node.keywords if word.arg} - OF_THE_LAUNCH
            assert given <= kernels.get(name, given), f"{name} has no {given - kernels[name]}"
