"""Configuration files of a Slurm lab: many nodes on one host, as the daemons of Debian's Slurm accept them."""

import socket
from collections.abc import Mapping
from pathlib import Path

from lab_registry import PORTS_EACH

CONTROLLER_PORT = 1  # offsets into the lab's port range
ACCOUNTING_PORT = 2
NODE_PORT = 10
RENDEZVOUS_PORTS = 12000  # the rendezvous port of a job follows from its id, modulo this
JOBS_EACH = 1000  # ids that labs on neighbouring ports do not assign

CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
"""


def slurm_conf(
    folder: Path,
    port: int,
    nodes: int,
    gpus: int,
    cpus: int,
    memory_mib: int,
    accounting: bool,
    cgroup: bool,
    settings: Mapping[str, str],
) -> str:
    """Return slurm.conf; `settings` replace or extend the defaults."""
    host = socket.gethostname().split(".")[0]
    keys = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": port + CONTROLLER_PORT,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={munge_socket(folder)},cred_expire=5",  # a requeued job waits that long
        "CredType": "cred/munge",
        "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool/%n",
        "SlurmctldPidFile": folder / "run/slurmctld.pid",
        "SlurmdPidFile": folder / "run/slurmd-%n.pid",
        "SlurmctldLogFile": folder / "log/slurmctld.log",
        "SlurmdLogFile": folder / "log/slurmd-%n.log",
        "SlurmdParameters": "config_overrides",  # this host has fewer cores than its nodes declare
        "ProctrackType": "proctrack/cgroup" if cgroup else "proctrack/linuxproc",
        "TaskPlugin": "task/cgroup" if cgroup else "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": 1,
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": 64,  # else each job takes a whole node
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_min_interval=100000,bf_interval=1,batch_sched_delay=0,sched_interval=5",
        "GresTypes": "gpu",
        "MpiDefault": "none",
        "ReturnToService": 1,  # 2 would return a node that a test set down to service at once
        "SlurmctldTimeout": 10,
        "SlurmdTimeout": 15,  # with less a busy node counts as dead
        "InactiveLimit": 0,
        "KillWait": 2,
        "MinJobAge": 300,
        "FirstJobId": first_job_id(port),
        "BatchStartTimeout": 10,
        "MessageTimeout": 10,
        "TCPTimeout": 2,
        "UnkillableStepTimeout": 10,
        "JobRequeue": 1,
        "EnforcePartLimits": "ALL",  # refuse jobs that can never run
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": folder / "log/jobcomp.txt",
        "AccountingStorageType": "accounting_storage/none",
    }
    if accounting:
        keys |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "127.0.0.1",
            "AccountingStoragePort": port + ACCOUNTING_PORT,
            "AccountingStoragePass": munge_socket(folder),
            "AccountingStorageTRES": "gres/gpu",
            "AccountingStorageEnforce": "associations",  # unknown accounts are refused
            "AccountingStoreFlags": "job_comment",
        }
    lines = [f"{key}={value}" for key, value in {**keys, **settings}.items()]
    for i in range(1, nodes + 1):
        lines.append(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + NODE_PORT + i} "
            f"CPUs={cpus} RealMemory={memory_mib} Gres=gpu:{gpus} State=UNKNOWN"
        )
    lines.append(f"PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def first_job_id(port: int, resets: int = 0) -> int:
    """Return the first job id, different for each lab, as all ranks are on this host. `resets`: of slurmctld."""
    return 1 + port // PORTS_EACH * JOBS_EACH % RENDEZVOUS_PORTS + RENDEZVOUS_PORTS * 10 * resets


def slurmdbd_conf(folder: Path, port: int) -> str:
    keys = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={munge_socket(folder)}",
        "DbdHost": socket.gethostname().split(".")[0],
        "DbdAddr": "127.0.0.1",
        "DbdPort": port + ACCOUNTING_PORT,
        "SlurmUser": "root",
        "PidFile": folder / "run/slurmdbd.pid",
        "LogFile": folder / "log/slurmdbd.log",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }
    return "".join(f"{key}={value}\n" for key, value in keys.items())


def gres_conf(folder: Path, nodes: int, gpus: int) -> str:
    return f"AutoDetect=off\nNodeName=n[1-{nodes}] Name=gpu File={folder}/dev/gpu[0-{gpus - 1}]\n"


def munge_socket(folder: Path) -> Path:
    return folder / "munge/munge.sock"
