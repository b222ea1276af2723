"""Cluster facts parsed from stored output of sinfo and scontrol."""

import pytest

from llmb.launch.slurm.cluster_facts import NodeGpus, Partition, duration_s, parse_gpus, parse_nodes, parse_partitions

SINFO = """\
cpu|up|4|(null)|infinite
gpu*|up|2|gpu:a100:8(S:0-1)|4:00:00
gpu*|up|126|gpu:h100:8(S:0-1)|4:00:00
old|down|1|gpu:4|7-00:00:00
"""
NODES = """\
NodeName=a1 Arch=aarch64 CoresPerSocket=72 CPUTot=144 Gres=gpu:gb200:4(S:0-1) OS=Linux 6.8 #1 SMP RealMemory=900000 Partitions=gpu,all
NodeName=a2 Arch=aarch64 CoresPerSocket=72 CPUTot=144 Gres=gpu:gb200:4(S:0-1) OS=Linux 6.8 #1 SMP RealMemory=800000 Partitions=gpu,all
NodeName=a3 CoresPerSocket=72 CPUTot=144 Gres=gpu:gb200:4(S:0-1) RealMemory=900000 Partitions=gpu,all
NodeName=c1 Arch=x86_64 CPUTot=64 Gres=(null) RealMemory=256000 Partitions=cpu,all
"""  # noqa: E501


def test_partitions_have_the_default_first_and_the_most_common_gres():
    assert parse_partitions(SINFO) == [
        Partition(name="gpu", default=True, up=True, nodes=128, gres="gpu:h100:8(S:0-1)", max_time_s=14400.0),
        Partition(name="cpu", default=False, up=True, nodes=4, gres=None, max_time_s=None),
        Partition(name="old", default=False, up=False, nodes=1, gres="gpu:4", max_time_s=604800.0),
    ]


def test_node_facts_are_those_of_the_majority():
    facts = parse_nodes(NODES, "gpu")
    assert (facts.architecture, facts.cpus, facts.memory_mib, facts.nodes) == ("aarch64", 144, 900000, 3)
    assert parse_gpus(facts.gres) == NodeGpus("gb200", 4)
    cpu_facts = parse_nodes(NODES, "cpu")
    assert (cpu_facts.architecture, cpu_facts.gres, cpu_facts.cpus) == ("x86_64", None, 64)
    assert parse_nodes(NODES, "gp") is None
    assert parse_nodes(NODES, None).nodes == 4


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        (None, None),
        ("nvme:2", None),
        ("gpu:8", NodeGpus(None, 8)),
        ("gpu", NodeGpus(None, 1)),
        ("gpu:h100:8(S:0-1),nvme:1", NodeGpus("h100", 8)),
        ("shard:16(S:0),gpu:a100:2(IDX:0-1),gpu:t4:4", NodeGpus("t4", 4)),
        ("gpu:nvidia_h100_80gb_hbm3:8", NodeGpus("nvidia_h100_80gb_hbm3", 8)),
    ],
)
def test_parse_gpus(gres, expected):
    assert parse_gpus(gres) == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30:00", 1800.0), ("4:00:00", 14400.0), ("2-12:00:00", 216000.0), ("infinite", None), ("n/a", None), ("", None)],
)
def test_duration(text, seconds):
    assert duration_s(text) == seconds
