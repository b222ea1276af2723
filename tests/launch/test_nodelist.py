"""Names of nodes from the lists that Slurm prints."""

import pytest

from llmb.launch.slurm.nodelist import node_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,08],gpu-a", ("n1", "n2", "n3", "n08", "gpu-a")),
        ("r[1-2]n[09-10]", ("r1n09", "r1n10", "r2n09", "r2n10")),
        ("n1", ("n1",)),
        ("(null)", ()),
        ("None assigned", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_node_names(text, names):
    assert node_names(text) == names
