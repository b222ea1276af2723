"""job.sh as text: golden for every row of every recipe, precedence of options, and values that need quoting.

After an intended change:  PYTHONPATH=. python tests/launch/test_job_script.py    # rewrites tests/golden/slurm
"""

import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.config.overrides import Setting
from llmb.config.recipe import Recipe, expand_gpus, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Limits, Machine, RunConfig
from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import LaunchSpec
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.cluster_config import Cluster, WorkloadSettings
from llmb.launch.slurm.job_script import (
    SbatchOverrides,
    job_options,
    sbatch_arguments,
    segment,
    slurm_script,
    with_gpus_per_node,
)
from llmb.launch.slurm.srun import (
    check_allocation_size,
    gpus_per_node_override,
    in_allocation,
    ranks_per_node,
    rendezvous,
    srun_command,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "slurm"
RECIPES = load_all([shipped()])
# Each row of out-of-core training searches a plan, for seconds.
WORKLOADS = [
    pytest.param(name, marks=pytest.mark.nightly if recipe.kind == "outofcore" else ())
    for name, recipe in RECIPES.items()
]
COMMAND = ["/venv/bin/python", "-m", "llmb.cli.job_runner", "/runs/one"]
RUN = RunFolder(Path("/runs/one"))
SCRIPT_END = "set -euo pipefail\nexport NCCL_DEBUG=WARN\nexec /venv/bin/python -m llmb.cli.job_runner /runs/one\n"


def configurations(recipe: Recipe) -> Iterator[RunConfig]:
    """Yield every row at every scale, dtype and GPU that it lists."""
    for row in recipe.rows:
        picks = [Setting(field=name, value=row[name], source="row") for name in ("mode", "use_case") if name in row]
        if recipe.kind == "outofcore":  # a script does not depend on the plan: skip the search
            fixed = {"gbs": 1, "seqs_per_round": 1, "chunk_tokens": min(row["seqlen"], 32768)}
            picks += [Setting(field=name, value=value, source="row") for name, value in fixed.items()]
        for gpu in _as_list(row["gpu"]):
            for dtype in _as_list(row["dtype"]):
                for gpus in expand_gpus(row["gpus"]):
                    request = RunRequest(size=row["size"], dtype=dtype, gpus=gpus, gpu=gpu, settings=tuple(picks))
                    yield resolve(recipe, request)


def _as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def golden(recipe: Recipe) -> str:
    """Return the sbatch options of each row, one line each; the rest of the script is the same for all."""
    lines = []
    for config in configurations(recipe):
        text = slurm_script(config, RUN, None, SbatchOverrides(), COMMAND, {"NCCL_DEBUG": "WARN"})
        options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
        assert text.endswith("\n" + SCRIPT_END)
        lines.append(f"{config.machine.gpu} {' '.join(options)}")
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_options_of_every_row_match_the_golden_file(workload: str) -> None:
    assert golden(RECIPES[workload]) == (GOLDEN / f"{workload}.txt").read_text()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_ranks_nodes_and_time_limit_of_every_row(workload: str) -> None:
    for config in configurations(RECIPES[workload]):
        options = job_options(config, RUN, None, SbatchOverrides())
        machine = config.machine
        assert int(options["nodes"]) * machine.gpus_per_node >= machine.gpus == int(options["ntasks"])
        assert int(options["gpus-per-node"]) == int(options["ntasks-per-node"]) <= machine.gpus_per_node
        hours, minutes, _ = map(int, options["time"].split(":"))
        assert 180 <= hours * 3600 + minutes * 60 - config.limits.time_limit_s < 240
        assert ("segment" in options) == (machine.gpu in ("gb200", "gb300") and machine.nodes > 1)


def test_generation_use_case_of_deepseek_has_a_longer_time_limit() -> None:
    times = {
        (config.workload.mode, config.workload.use_case): job_options(config, RUN, None, SbatchOverrides())["time"]
        for config in configurations(RECIPES["inference_deepseek-r1"])
    }
    assert times.pop(("max_throughput", "generation")) == "01:43:00"
    assert set(times.values()) == {"00:33:00"}


@pytest.mark.parametrize(
    ("nodes", "size"), [(2, 2), (18, 18), (32, 16), (36, 18), (34, 17), (37, 1), (128, 16), (256, 16)]
)
def test_segment_is_the_largest_divisor_within_an_nvlink_domain(nodes: int, size: int) -> None:
    assert segment(Machine(gpu="gb200", gpus=4 * nodes, gpus_per_node=4)) == size
    assert segment(Machine(gpu="h100", gpus=8 * nodes, gpus_per_node=8)) is None


@pytest.fixture
def h100(config: RunConfig) -> RunConfig:
    return replace(config, machine=Machine(gpu="h100", gpus=16, gpus_per_node=8))


def cluster_with(sbatch: dict[str, str], **more) -> Cluster:
    return Cluster(path=Path("cluster_config.yaml"), sbatch=sbatch, **more)


def test_command_line_overrides_cluster_which_overrides_run_defaults(h100: RunConfig) -> None:
    cluster = cluster_with(
        {"partition": "batch", "account": "us", "gpus-per-node": "h100:8", "mem": "100G", "time": "1"}
    )
    overrides = SbatchOverrides(nice=5, nodelist="n[1-2]", arguments=("partition=fast", "contiguous"))
    options = job_options(h100, RUN, cluster, overrides)
    expected = {"partition": "fast", "account": "us", "gpus-per-node": "h100:8", "mem": "100G", "nice": "5"}
    assert expected.items() <= options.items()
    assert (options["nodelist"], options["contiguous"], options["exclusive"]) == ("n[1-2]", "", "")
    assert options["time"] == "00:33:00"


def test_workload_settings_and_fewer_gpus_than_a_node_has(h100: RunConfig) -> None:
    workloads = {"pretrain_tiny": WorkloadSettings(sbatch={"qos": "high"})}
    small = replace(h100, machine=Machine(gpu="h100", gpus=2, gpus_per_node=8))
    options = job_options(small, RUN, cluster_with({"gpus-per-node": "h100:8"}, workloads=workloads), SbatchOverrides())
    assert (options["gpus-per-node"], options["qos"], options["nodes"]) == ("h100:2", "high", "1")
    assert not {"exclusive", "mem"} & options.keys()
    assert "gpus-per-node" not in job_options(
        small, RUN, cluster_with({}), SbatchOverrides()
    )  # a site whose Slurm has no GPU GRES


def test_cpu_ranks_request_no_gpu(config: RunConfig) -> None:
    spread = with_gpus_per_node(replace(config, machine=Machine(gpu="cpu", gpus=4, gpus_per_node=1024)), 2)
    cluster = cluster_with(
        {"gpus-per-node": "8", "partition": "gpu"}, cpu_sbatch={"partition": "cpu", "gpus-per-node": "8"}
    )
    options = job_options(spread, RUN, cluster, SbatchOverrides())
    assert (options["nodes"], options["ntasks-per-node"], options["cpus-per-task"]) == ("2", "2", "1")
    assert options["partition"] == "cpu"
    assert not [name for name in options if "gpu" in name]


@pytest.mark.parametrize(
    ("overrides", "extra", "message"),
    [
        (SbatchOverrides(nice=1), ("qos=a",), "--nice and ADDITIONAL_SLURM_PARAMS both"),
        (SbatchOverrides(arguments=("qos=b",)), ("qos=a",), "--slurm-arg and ADDITIONAL_SLURM_PARAMS both"),
        (SbatchOverrides(arguments=("--qos=b",)), (), "without dashes before it, got '--qos=b'"),
        (SbatchOverrides(arguments=("qos=b", "qos=c")), (), "--slurm-arg qos is given twice"),
        (SbatchOverrides(arguments=("nodelist=n1",)), (), "--slurm-arg nodelist: has an option of its own, --nodelist"),
        (SbatchOverrides(arguments=("nodes=3",)), (), "--slurm-arg nodes: is set by each run"),
        (SbatchOverrides(arguments=("time=3",)), (), "set that one: --timeout SECONDS"),
        (SbatchOverrides(), ("ntasks=3",), "ntasks is set by each run"),
    ],
)
def test_duplicate_and_reserved_options_are_refused(config, overrides, extra, message) -> None:
    config = replace(config, limits=Limits(slurm_params=extra))
    with pytest.raises(ConfigError, match=message):
        job_options(config, RUN, None, overrides)


def test_additional_slurm_params_reach_sbatch(h100: RunConfig) -> None:
    config = replace(h100, limits=Limits(slurm_params=("qos=high", "contiguous", "mem=1G")))
    options = job_options(config, RUN, None, SbatchOverrides())
    assert (options["qos"], options["contiguous"], options["mem"]) == ("high", "", "1G")


def test_script_names_the_options_that_it_cannot_hold_with_their_values(h100: RunConfig) -> None:
    config = replace(h100, limits=Limits(slurm_params=("constraint=gpu&memory", "exclusive")))
    text = slurm_script(config, RUN, None, SbatchOverrides(), COMMAND, {})
    assert "#SBATCH --exclusive\n" in text
    by_hand = "sbatch '--constraint=gpu&memory' job.sh\n"
    assert f"\n# What llmb-run submit sends to Slurm; by hand, to run it again: {by_hand}" in text
    plain = slurm_script(h100, RUN, None, SbatchOverrides(), COMMAND, {})
    assert "by hand, to run it again: sbatch job.sh\n" in plain


HOSTILE = [
    "a b",
    "it's",
    'a "b"',
    "$HOME",
    "`id`",
    "a\nb",
    "#SBATCH --nodes=99",
    "a;b",
    "100%",
    "back\\slash",
    "\u00e9",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_special_characters_reach_the_job_and_no_sbatch_line(config: RunConfig, tmp_path: Path, value: str) -> None:
    run = RunFolder(tmp_path / value.replace("/", "_"))
    run.path.mkdir()
    command = ["bash", "-c", 'printf "%s|" "$ODD" "$@"; pwd', "x", str(run.path)]
    overrides = SbatchOverrides(reservation=value)
    text = slurm_script(config, run, None, overrides, command, {"ODD": value, "HF_TOKEN": "hf_" + "x" * 30})
    (run.path / "job.sh").write_text(text)
    process = subprocess.run(["bash", "job.sh"], cwd=run.path, capture_output=True, text=True, check=True)
    assert process.stdout == f"{value}|{run.path}|{run.path}\n"
    assert "hf_" not in text
    assert "# Secret, taken from your environment: HF_TOKEN" in text
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    arguments = sbatch_arguments(config, run, None, overrides)
    assert len(lines) + len(arguments) == len(job_options(config, run, None, overrides))
    for line in lines:
        assert shlex.split(line, comments=False) == line.split()
        assert "nodes=99" not in line
    special = not value.replace("%", "").isalnum() or not value.isascii()
    assert (f"--reservation={value}" in arguments) == special
    assert (f"--chdir={run.path}" in arguments) == special


def test_output_expands_only_the_job_id(config: RunConfig) -> None:
    outputs = [
        job_options(config, RunFolder(Path(name)), None, SbatchOverrides())["output"] for name in ("/a%j", "/b\\c")
    ]
    assert outputs == ["/a%%j/slurm-%j.out", "/b\\\\c/slurm.out"]


# Ranks inside the job

JOB = {"SLURM_JOB_ID": "40123", "SLURM_JOB_NODELIST": "gpu[007-9,12]-ib,x1", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[1-4]", "n1"), ("a,b", "a"), ("gpu[007-9,12]-ib", "gpu007-ib"), ("r[1-2]n[5,7],z", "r1n5")],
)
def test_master_addr_is_the_first_host(nodes: str, first: str) -> None:
    assert rendezvous({**JOB, "SLURM_JOB_NODELIST": nodes})["MASTER_ADDR"] == first


def test_two_jobs_have_different_master_ports() -> None:
    variables = rendezvous(JOB)
    assert variables["MASTER_ADDR"] == "gpu007-ib"
    assert 20000 <= int(variables["MASTER_PORT"]) < 32000
    assert variables["MASTER_PORT"] != rendezvous({**JOB, "SLURM_JOB_ID": "40124"})["MASTER_PORT"]


def test_srun_starts_one_rank_per_gpu(h100: RunConfig, config: RunConfig) -> None:
    spec = LaunchSpec(command=("python", "-m", "llmb.train", "config.json"))
    command = srun_command(h100, spec, JOB)
    assert command[:4] == ["srun", "--nodes=2", "--ntasks=16", "--ntasks-per-node=8"]
    assert {"--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=none"} <= set(command)
    assert command[-4:] == list(spec.command)
    bound = srun_command(h100, replace(spec, tasks="node", mpi="pmix"), {**JOB, "SLURM_CPUS_PER_TASK": "7"})
    assert bound[1:4] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert {"--cpus-per-task=7", "--mpi=pmix"} <= set(bound)
    words = ["bash", *srun_command(config, LaunchSpec(command=("env",)), JOB)[-4:]]
    environ = {"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "PATH": "/usr/bin:/bin"}
    process = subprocess.run(words[1:] if words[1] == "bash" else words, env=environ, capture_output=True, text=True)
    assert {"RANK=3", "WORLD_SIZE=16", "LOCAL_RANK=1"} <= set(process.stdout.splitlines())


def test_in_allocation() -> None:
    assert in_allocation(JOB)
    assert in_allocation({**JOB, "SLURM_STEP_ID": "4294967290"})
    assert not in_allocation({**JOB, "SLURM_STEP_ID": "0"})
    assert not in_allocation({})


def test_ranks_per_node_and_allocation_size(h100: RunConfig, config: RunConfig) -> None:
    four = replace(config, machine=Machine(gpu="cpu", gpus=4, gpus_per_node=1024))
    assert ranks_per_node(four, JOB, cluster_gpus=8) == 2
    assert ranks_per_node(h100, JOB, cluster_gpus=None) is None
    assert ranks_per_node(h100, JOB, cluster_gpus=4) == 4
    assert ranks_per_node(h100, {**JOB, "GPUS_PER_NODE": "2"}, cluster_gpus=4) == 2
    with pytest.raises(ConfigError, match="GPUS_PER_NODE: expected a whole number above 0, got 'x'"):
        gpus_per_node_override({"GPUS_PER_NODE": "x"})
    check_allocation_size(h100, JOB)
    with pytest.raises(ConfigError, match="2 nodes of 8 ranks are needed, this allocation has 1; sbatch -N 2"):
        check_allocation_size(h100, {**JOB, "SLURM_JOB_NUM_NODES": "1"})


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, recipe in RECIPES.items():
        (GOLDEN / f"{name}.txt").write_text(golden(recipe))
