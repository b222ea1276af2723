"""Ranks on several nodes of a real Slurm compute what they compute here, for every architecture."""

import json

import pytest
from slurm_test_runs import DEEPSEEK, GROK, LLAMA, NEMOTRON, ended, facts, allocated_nodes

from llmb.config.serialization import read_json
from llmb.events import RunStarted, read
from llmb.launch.run_folder import RunFolder

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        ([*LLAMA, "--set", "steps=3"], 2),
        pytest.param([*LLAMA, "--set", "steps=3"], 4, marks=pytest.mark.nightly),
        pytest.param([*GROK, "--set", "steps=3"], 2, marks=pytest.mark.nightly),
        pytest.param([*GROK, "--set", "steps=3"], 4, marks=pytest.mark.nightly),
        pytest.param([*NEMOTRON, "--set", "steps=3"], 2, marks=pytest.mark.nightly),
        pytest.param([*NEMOTRON, "--set", "steps=3"], 4, marks=pytest.mark.nightly),
        pytest.param([*DEEPSEEK, "--set", "num_requests=4"], 2, marks=pytest.mark.nightly),
    ],
    ids=["llama-2", "llama-4", "grok-2", "grok-4", "nemotron-2", "nemotron-4", "deepseek-2"],
)
def test_ranks_on_several_nodes_compute_what_they_compute_here(slurm, submit, llmb_run, run, ranks):
    asked = [*run, "--scale", str(ranks)]
    job, there = submit(*asked, "--env", "ODD=a 'b' $c\n`d`")
    result = ended(slurm, job, there)
    assert result["status"] == "ok", result
    code, out, err = llmb_run("submit", *asked, "--on", "local", "--json")
    assert code == 0, err
    [here] = [found for found in RunFolder.find_all(there.install) if found.job_id == "L1"]
    assert facts(there, ranks) == facts(here, ranks) != []
    hosts = {event.host for rank in range(ranks) for event in read(there.events(rank)) if isinstance(event, RunStarted)}
    assert None not in hosts
    allocation = read_json(there.allocation)
    assert (allocation["job_id"], allocation["restarts"]) == (job, 0)
    assert allocated_nodes(slurm, job) == (ranks, allocation["nodes"])
    assert there.record(job).exists()
    assert json.loads(out)["status"] == "ok"
