"""Refused CUDA graph configurations; tests/gpu/test_cuda_graphs_gpu.py tests what graphs compute."""

import pytest
from small_models import SMALL_MODELS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "cuda_graphs=true needs a CUDA GPU; machine.gpu=cpu has none"),
        ({"pp": 2}, "the native training engine does not run cuda_graphs=true with pp=2; it runs"),
        ({"offload_layers": 1}, "the native training engine does not run cuda_graphs=true with offload_layers=1; it"),
        (
            {"model": SMALL_MODELS["grok1"], "dtype": "fp32"},
            "the native training engine does not run cuda_graphs=true with experts in fp32; it runs",
        ),
    ],
)
def test_unsupported_cuda_graphs_are_refused(trained, capsys, changes: dict, reason: str) -> None:
    done = trained(cuda_graphs=True, **changes)
    assert done.code == 1
    assert done.ended().reason.startswith(reason)
    assert capsys.readouterr() == ("", f"llmb.train: {done.ended().reason}\n")
