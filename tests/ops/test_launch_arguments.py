"""Every keyword of a Triton launch is an argument of the kernel: the interpreter does not check it."""

import ast
from pathlib import Path

import pytest

import llmb.ops

FILES = sorted(Path(llmb.ops.__file__).parent.rglob("*_triton.py"))
LAUNCH_OPTIONS = {"num_warps", "num_stages", "maxnreg", "num_ctas", "launch_pdl", "enable_fp_fusion"}


def kernels_in(tree: ast.Module) -> dict[str, set[str]]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    kernels = [f for f in functions if any("jit" in ast.unparse(decorator) for decorator in f.decorator_list)]
    return {f.name: {argument.arg for argument in f.args.args} for f in kernels}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_launch_keywords_are_kernel_arguments(path):
    tree = ast.parse(path.read_text())
    kernels = kernels_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg} - LAUNCH_OPTIONS
            assert keywords <= kernels.get(name, keywords), f"{name} has no {keywords - kernels[name]}"
