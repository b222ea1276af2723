"""What an engine asks of whoever starts it on a cluster, so that one job script serves every engine.

    order = engine_order(config, rundir, sys.executable, environ)    # command.py; the variables: engine_environment
    order.lay_out(rundir)                                            # its files, into the run folder
    srun ... --mpi=pmix ... trtllm-llmapi-launch bash trtllm.sh

An engine does not know Slurm: it says what one task runs, how many tasks a node gets, and what a container would have
to show it. Ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmb.config.serialization import write_whole
from llmb.config.spec import Machine
from llmb.launch.run_folder import RunDir


@dataclass(frozen=True, kw_only=True)
class EngineOrder:
    """One engine's wishes for one run."""

    command: tuple[str, ...]  # of one task, which is started in the run folder
    tasks: Literal["gpu", "node"] = "gpu"  # one for each
    mpi: str | None = None  # of srun's --mpi; none: the cluster's default
    files: Mapping[str, str] = field(default_factory=dict)  # name where the engine works -> text
    folders: tuple[str, ...] = ()  # what a container must show besides the run folder, as it is named outside

    def tasks_per_node(self, machine: Machine) -> int:
        """How many tasks each node starts."""
        return 1 if self.tasks == "node" else min(machine.gpus, machine.gpus_per_node)

    def lay_out(self, rundir: RunDir) -> None:
        """Write the files that the command reads."""
        for name, text in self.files.items():
            write_whole(rundir.work / name, text)
