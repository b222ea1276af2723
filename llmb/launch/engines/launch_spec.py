"""Launch spec of an engine on a cluster, so that one job script serves every engine.

    spec = build_launch_spec(config, run_folder, sys.executable, environ)    # command.py
    spec.write_files(run_folder)
    srun ... --mpi=pmix ... trtllm-llmapi-launch bash trtllm.sh

An engine does not know Slurm: its spec names the command of one task, the tasks per node, and the folders that a
container must mount. Ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmb.config.serialization import write_atomic
from llmb.config.spec import Machine
from llmb.launch.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """Command, tasks, files and folders of one run."""

    command: tuple[str, ...]  # of one task, which is started in the run folder
    tasks: Literal["gpu", "node"] = "gpu"  # one task per GPU or per node
    mpi: str | None = None  # --mpi of srun; None: none
    files: Mapping[str, str] = field(default_factory=dict)  # name in the run folder -> text
    folders: tuple[str, ...] = ()  # that a container must mount besides the run folder

    def tasks_per_node(self, machine: Machine) -> int:
        """Return the tasks per node."""
        return 1 if self.tasks == "node" else min(machine.gpus, machine.gpus_per_node)

    def write_files(self, run_folder: RunFolder) -> None:
        """Write the files that the command reads."""
        for name, text in self.files.items():
            write_atomic(run_folder.work / name, text)
