"""Findings of doctor on healthy and sick machines, and the node that differs from the others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_gpus import machine

from llmb.config.serialization import to_json
from llmb.errors import ConfigError
from llmb.launch.doctor.disk_facts import DiskFacts, filesystem_of
from llmb.launch.doctor.examination import Examination, judge
from llmb.launch.doctor.finding import has_problem
from llmb.launch.doctor.host_facts import Port, host_facts
from llmb.launch.doctor.node_examinations import gathered
from llmb.launch.doctor.odd_nodes import OddFact, odd_nodes
from llmb.launch.doctor.software_facts import has_token, software_facts
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.node_tasks import NodeState, choose_nodes, parse_labelled, srun_on_nodes


def lines(examination: Examination, topic: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in examination.findings if finding.topic == topic]


def test_healthy_machine_has_nothing_to_do():
    findings = judge(machine()).findings
    assert {finding.level for finding in findings} == {"ok"}
    assert not any(finding.remedy for finding in findings)
    topics = {finding.topic for finding in findings}
    assert topics >= {
        "GPUs", "driver", "clocks", "power limit", "throttling", "ECC", "PCIe", "NVLink", "NUMA", "governor",
        "processes", "torch", "NCCL", "Slurm", "containers", "disk", "tokens",
    }  # fmt: skip


def test_sick_gpus_are_named_with_what_to_do():
    examination = judge(machine("sick"))
    assert has_problem(examination.findings)
    assert all(finding.remedy for finding in examination.findings if finding.level != "ok")
    assert lines(examination, "power limit") == [("warning", "GPU 0: 400 W, the part's default is 700 W")]
    assert lines(examination, "clocks") == [("warning", "GPU 1: applications clock 1200 MHz, default 1980 MHz")]
    assert lines(examination, "throttling") == [("problem", "GPU 0: hw_slowdown, hw_thermal_slowdown at 91 C")]
    assert lines(examination, "ECC") == [("problem", "GPU 1: 3 uncorrected errors")]
    assert lines(examination, "PCIe") == [("problem", "GPU 0: x8 of x16"), ("warning", "GPU 0: 4711 replays")]
    assert lines(examination, "NVLink") == [
        ("problem", "GPU 1: NVSwitch fabric is in progress"), ("problem", "GPU 1: 16 of 18 links active"),
    ]  # fmt: skip
    assert lines(examination, "processes") == [("warning", "GPU 1: pid 4242 python3, 20.0 GiB")]
    assert lines(examination, "persistence") == [("warning", "GPU 0: off")]
    remedy = next(finding.remedy for finding in examination.findings if finding.topic == "power limit")
    assert remedy.startswith("sudo nvidia-smi -i 0 -pl 700,")


def test_gpu_at_its_power_limit_is_healthy():
    assert lines(judge(machine("rtx3090", numa_nodes=1)), "throttling") == [
        ("ok", "only by the power limit, as under load")
    ]


def test_gpus_without_a_driver_are_a_problem_and_no_gpus_are_not():
    nothing = machine(None)
    assert not has_problem(judge(nothing).findings)
    on_bus = replace(nothing, host=replace(nothing.host, gpu_numa={"0000:1b:00.0": 0}))
    assert lines(judge(on_bus), "GPUs") == [
        ("problem", "1 NVIDIA GPUs on the PCI bus, but nvidia-smi is not installed")
    ]
    failed = replace(nothing, gpu_error="nvidia-smi failed: no devices")
    assert lines(judge(failed), "GPUs") == [("problem", "nvidia-smi failed: no devices")]


def test_gpu_that_fell_off_the_bus():
    facts = machine()
    assert lines(judge(replace(facts, gpus=facts.gpus[:1])), "GPUs")[0][0] == "warning"


@pytest.mark.parametrize(
    ("torch_cuda", "level"), [("11.8", "ok"), ("12.8", "ok"), ("12.9", "warning"), ("13.0", "problem")]
)
def test_torch_must_not_be_newer_than_the_driver(torch_cuda, level):
    facts = machine()
    facts = replace(facts, software=replace(facts.software, torch_cuda=torch_cuda))
    assert lines(judge(facts), "driver")[0][0] == level


@pytest.mark.parametrize(
    ("changes", "topic", "level"),
    [
        ({"governors": ("powersave",)}, "governor", "warning"),
        ({"numa_balancing": True}, "NUMA", "warning"),
        ({"gpu_numa": {"0000:1b:00.0": -1, "0000:43:00.0": -1}}, "NUMA", "warning"),
        ({"shm_bytes": 64 << 20}, "host memory", "warning"),
        ({"ports": (Port(name="mlx5_0:1", state="DOWN", rate="400 Gb/sec"),)}, "InfiniBand", "warning"),
    ],
)
def test_hosts(changes, topic, level):
    assert lines(judge(machine(**changes)), topic)[0][0] == level


@pytest.mark.parametrize(
    ("changes", "topic", "level"),
    [
        ({"torch": None}, "torch", "warning"),
        ({"torch": "2.11.0+cpu", "torch_cuda": "cpu"}, "torch", "problem"),
        ({"nccl_settings": {"NCCL_P2P_DISABLE": "1"}}, "NCCL", "warning"),
        ({"nccl_settings": {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"}}, "NCCL", "ok"),
        ({"nccl_settings": {"NCCL_NVLS_ENABLE": "0"}}, "NCCL", "warning"),
        ({"slurm_error": "Slurm does not respond"}, "Slurm", "warning"),
    ],
)
def test_software(changes, topic, level):
    facts = machine()
    assert lines(judge(replace(facts, software=replace(facts.software, **changes))), topic)[0][0] == level


@pytest.mark.parametrize(
    ("changes", "level"),
    [({"writable": False}, "problem"), ({"free_bytes": 10**8}, "problem"), ({"free_bytes": 10**10}, "warning"),
     ({"filesystem": "tmpfs"}, "warning")],
)  # fmt: skip
def test_disks(changes, level):
    facts = machine()
    disk = DiskFacts(path="/x", filesystem="ext4", free_bytes=10**12, writable=True)
    assert lines(judge(replace(facts, disks=(replace(disk, **changes),))), "disk")[0][0] == level


def test_odd_node_is_named_with_what_the_others_have():
    odd = odd_nodes({"n1": machine(), "n2": machine("sick"), "n3": machine(governors=("powersave",)), "n4": machine()})
    by_fact = {item.fact: item for item in odd}
    assert by_fact.keys() == {"power limit", "applications clock", "PCIe", "NVLinks", "governor"}
    assert by_fact["power limit"] == OddFact(fact="power limit", usual="2 x 700 W", nodes={"n2": "400 W, 700 W"})
    assert by_fact["governor"].nodes == {"n3": "powersave"}


def test_two_nodes_that_differ_are_both_named():
    (odd,) = odd_nodes({"n1": machine(), "n2": machine(governors=("powersave",))})
    assert (odd.usual, odd.nodes) == (None, {"n1": "performance", "n2": "powersave"})


def test_examinations_travel_as_json_and_a_silent_node_is_reported():
    outputs = {"n1": to_json(judge(machine())), "n3": "Traceback: boom"}
    examined = gathered(["n1", "n2", "n3"], outputs, "srun: error", (NodeState(name="n4", state="drain"),))
    assert examined.nodes == (judge(machine()),)
    assert examined.silent == {"n2": "srun: error", "n3": "Traceback: boom"}


def test_labelled_output_is_put_together_by_node():
    text = '1: llmb-node n2\n0: llmb-node n1\n1: {"a": \n0: {}\n1: 1}\nsrun: noise\n'
    assert parse_labelled(text) == {0: ("n1", "{}"), 1: ("n2", '{"a": 1}')}


def test_srun_takes_the_same_nodes_as_a_run():
    command = srun_on_nodes(["python"], ["n1", "n2"], {"partition": "gpu", "gpus-per-node": "8", "exclusive": ""})
    assert command[:6] == [
        "srun",
        "--partition=gpu",
        "--gpus-per-node=8",
        "--exclusive",
        "--nodes=2",
        "--nodelist=n1,n2",
    ]
    assert "--ntasks-per-node=1" in command


@pytest.fixture
def sinfo(monkeypatch, tmp_path):
    """Slurm's program as it answers about five nodes."""
    lines = "n1|idle|none\nn2|drain|fan\nn3|idle|none\nn4|alloc|none\nn5|down*|Not responding\n"
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("sinfo")
def test_nodes_that_no_job_gets_are_refused_instead_of_waited_for():
    assert choose_nodes(None, "n[3-4]", {}).names == ("n3", "n4")
    with pytest.raises(ConfigError, match=r"no job gets these nodes: n2 is drain \(fan\), n5 is down\* \(Not resp"):
        choose_nodes(None, "n[2-5]", {})
    with pytest.raises(ConfigError, match="Slurm has no node n9; `sinfo -N` lists"):
        choose_nodes(None, "n1,n9", {})


@pytest.mark.usefixtures("sinfo")
def test_nodes_of_an_allocation_or_of_a_nodelist_are_asked():
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    inside = choose_nodes(None, None, allocation)
    assert (inside.names, inside.options) == (("n1", "n2"), {"overlap": ""})
    assert choose_nodes(None, "n2", allocation).names == ("n2",)
    cluster = Cluster(path=Path("c.yaml"), sbatch={"partition": "gpu", "gpus-per-node": "8", "comment": "x"})
    outside = choose_nodes(cluster, "n[3-4]", {})
    assert (outside.names, outside.options) == (("n3", "n4"), {"partition": "gpu", "gpus-per-node": "8", "time": "10"})


def test_node_states():
    assert [NodeState(name="n", state=state).usable for state in ("idle", "idle~", "mix", "drain", "down*")] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_host_facts_from_a_copy_of_proc_and_sys(tmp_path):
    files = {
        "proc/cpuinfo": "model name\t: Xeon 8480\n", "proc/meminfo": "MemTotal:       1024 kB\n",
        "proc/sys/kernel/numa_balancing": "1\n", "sys/devices/system/node/node0/x": "",
        "sys/devices/system/node/node1/x": "", "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n", "sys/bus/pci/devices/0000:1c:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:1c:00.0/class": "0x068000\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    host = host_facts({"SLURMD_NODENAME": "n7"}, tmp_path)
    assert (host.name, host.cpu, host.memory_bytes, host.numa_nodes, host.numa_balancing) == (
        "n7", "Xeon 8480", 1 << 20, 2, True,
    )  # fmt: skip
    assert (host.governors, host.gpu_numa) == (("powersave",), {"0000:1b:00.0": 1})
    assert host.ports == (Port(name="mlx5_0:1", state="ACTIVE", rate="400 Gb/sec (4X NDR)"),)


def test_filesystem_of_the_longest_mount_point(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"none / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n")
    assert filesystem_of(tmp_path / "a", mounts) == "nfs4"
    assert filesystem_of(tmp_path.parent, mounts) == "ext4"


def test_tokens_are_named_and_their_values_never_shown(tmp_path, monkeypatch):
    secret = "hf_" + "x" * 30
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = software_facts({"HF_TOKEN": secret, "HOME": str(tmp_path)})
    assert facts.tokens["HF_TOKEN"] is True
    assert facts.tokens["NGC_API_KEY"] is False
    assert secret not in json.dumps(str(facts))
    assert not has_token("HF_TOKEN", {"HOME": str(tmp_path)})
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text(secret)
    assert has_token("HF_TOKEN", {"HOME": str(tmp_path)})
