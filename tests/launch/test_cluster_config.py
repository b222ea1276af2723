"""cluster_config.yaml: both schemas, precedence of settings, and that every value survives or is refused."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmb.errors import ConfigError, LaunchError
from llmb.launch.slurm.cluster_config import CLUSTER_FILE, Container, as_yaml, find_cluster, read_cluster, write_cluster
from llmb.launch.slurm.cluster_file import load_yaml_as_text, to_current_schema
from llmb.launch.slurm.sbatch_options import OPTIONS, RESERVED_OPTIONS, option_name, parse_additional_params

SCHEMA_2 = """
schema_version: 2
llmb_repo: /lustre/recipes
llmb_install: /lustre/llmb
gpu_type: GB200
cluster_name: big
install: {node_architecture: aarch64, venv_type: venv, method: slurm}
environment:
  NCCL_DEBUG: INFO
  GREETING: 'say "hi"; it''s me'
  SBATCH_QOS: high
slurm:
  account: all
  gpu: {partition: batch, gres: 4, exclusive: true}
  cpu: {partition: small, gres: null}
container:
  image: /lustre/images/nemo.sqsh
  mounts: ["/lustre:/lustre", "/raid:/raid:ro"]
workloads:
  installed: [pretrain_llama3.1, pretrain_grok1]
  config:
    pretrain_llama3.1:
      venv_path: /lustre/venvs/a b
      venv_type: venv
      environment: {NCCL_DEBUG: null, TP_COMM_OVERLAP: 1, ADDITIONAL_SLURM_PARAMS: "constraint=fast;spread-job"}
    pretrain_llama3.1_405b:
      slurm: {partition: large, SBATCH_TIMELIMIT: 1:30:00, exclusive: null}
      container_image: /lustre/images/other.sqsh
"""

SCHEMA_1 = """
launcher: {llmb_repo: /lustre/recipes, llmb_install: /lustre/llmb, gpu_type: h100, node_architecture: x86_64}
slurm: {account: all, gpu_partition: batch, gpu_gres: 8, cpu_partition: small, cpu_gres: null, qos: high}
environment: {A: b}
workloads:
  installed: [pretrain_grok1]
"""

SCHEMA_1_ALL_IN_LAUNCHER = """
launcher: {gpu_type: h100, account: all, gpu_partition: batch, gpu_gres: 8, cpu_partition: small}
"""


def parse(tmp_path: Path, text: str):
    (tmp_path / CLUSTER_FILE).write_text(text)
    return read_cluster(tmp_path / CLUSTER_FILE)


def error_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text)
    assert "\n" not in str(caught.value).strip()
    return str(caught.value)


def test_schema_2(tmp_path):
    cluster = parse(tmp_path, SCHEMA_2)
    assert (cluster.name, cluster.gpu_type, cluster.gpus_per_node, cluster.architecture) == (
        "big",
        "gb200",
        4,
        "aarch64",
    )
    assert cluster.sbatch == {
        "account": "all",
        "partition": "batch",
        "gpus-per-node": "4",
        "exclusive": "",
        "qos": "high",
    }
    assert cluster.cpu_sbatch == {"account": "all", "partition": "small", "qos": "high"}
    assert cluster.environment == {"NCCL_DEBUG": "INFO", "GREETING": 'say "hi"; it\'s me'}
    assert cluster.container == Container(
        image="/lustre/images/nemo.sqsh", mounts=("/lustre:/lustre", "/raid:/raid:ro")
    )
    assert cluster.installed == ("pretrain_llama3.1", "pretrain_grok1")


def test_workload_and_size_override_the_cluster(tmp_path):
    cluster = parse(tmp_path, SCHEMA_2)
    assert cluster.for_target("pretrain_grok1_314b") == cluster
    small = cluster.for_target("pretrain_llama3.1_8b")
    assert small == cluster.for_target("pretrain_llama3.1")
    assert small.environment == {"GREETING": 'say "hi"; it\'s me', "TP_COMM_OVERLAP": "1"}
    assert small.sbatch == {**cluster.sbatch, "constraint": "fast", "spread-job": ""}
    large = cluster.for_target("pretrain_llama3.1_405b")
    without_exclusive = {name: value for name, value in small.sbatch.items() if name != "exclusive"}
    assert large.sbatch == {
        **without_exclusive,
        "partition": "large",
        "time": "1:30:00",
    }  # not the 5400 that YAML would make
    assert large.environment == small.environment
    assert large.cpu_sbatch == {**small.cpu_sbatch, "time": "1:30:00"}  # the partition is for jobs with GPUs
    assert large.container == Container(image="/lustre/images/other.sqsh", mounts=("/lustre:/lustre", "/raid:/raid:ro"))
    assert cluster.workloads["pretrain_llama3.1"].venv_path == "/lustre/venvs/a b"


def test_schema_1(tmp_path):
    cluster = parse(tmp_path, SCHEMA_1)
    assert (cluster.gpu_type, cluster.gpus_per_node, cluster.architecture) == ("h100", 8, "x86_64")
    assert cluster.sbatch == {"account": "all", "partition": "batch", "gpus-per-node": "8", "qos": "high"}
    assert cluster.cpu_sbatch == {"account": "all", "partition": "small", "qos": "high"}
    assert cluster.environment == {"A": "b"}


def test_schema_1_with_everything_under_launcher(tmp_path):
    cluster = parse(tmp_path, SCHEMA_1_ALL_IN_LAUNCHER)
    assert cluster.sbatch == {"account": "all", "partition": "batch", "gpus-per-node": "8"}
    assert cluster.cpu_sbatch == {"account": "all", "partition": "small"}


def test_common_block_and_no_cpu_block(tmp_path):
    cluster = parse(tmp_path, "slurm: {common: {account: all}, gpu: {partition: p}}")
    assert cluster.sbatch == cluster.cpu_sbatch == {"account": "all", "partition": "p"}
    assert cluster.gpus_per_node is None


@pytest.mark.parametrize(
    ("gres", "option", "count"),
    [
        ("8", {"gpus-per-node": "8"}, 8),
        ("gpu:8", {"gpus-per-node": "8"}, 8),
        ("gpu:h100:4", {"gpus-per-node": "h100:4"}, 4),
        ("gpu:8,nvme:1", {"gres": "gpu:8,nvme:1"}, None),
        ("\u00b2", {"gres": "\u00b2"}, None),  # a digit to Python, but not a number
        ("9" * 5000, {"gres": "9" * 5000}, None),
        ("null", {}, None),
    ],
)
def test_gres_maps_to_gpus_per_node(tmp_path, gres, option, count):
    cluster = parse(tmp_path, f"slurm: {{gpu: {{gres: '{gres}'}}}}" if gres != "null" else "slurm: {gpu: {gres: null}}")
    assert (cluster.sbatch, cluster.gpus_per_node) == (option, count)


def test_container_variables_of_nvidia_recipes(tmp_path):
    cluster = parse(tmp_path, "environment: {RUN_CONF_IMAGE: a.sqsh, RUN_CONF_MOUNTS: '/a:/a,/b:/c'}")
    assert cluster.container == Container(image="a.sqsh", mounts=("/a:/a", "/b:/c"))
    assert cluster.environment == {}
    workloads = "workloads: {config: {w: {environment: {RUN_CONF_MOUNTS: '/d:/d'}, container_mounts: ['/e']}}}"
    cluster = parse(tmp_path, f"environment: {{RUN_CONF_IMAGE: a.sqsh, RUN_CONF_MOUNTS: '/a:/a'}}\n{workloads}")
    assert cluster.for_target("w_8b").container == Container(image="a.sqsh", mounts=("/a:/a", "/e", "/d:/d"))
    assert cluster.for_target("w_8b").environment == {}


@pytest.mark.parametrize("text", ["slurm:\n", "schema_version: 2\n"])
def test_file_without_values_sets_nothing(tmp_path, text):
    cluster = parse(tmp_path, text)
    assert (cluster.sbatch, cluster.environment, cluster.container, cluster.gpu_type) == ({}, {}, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launcher: {gpu_type: h100}\ngpu_type: h100", "keep one of the two"),
        ("schema_version: 2\nlauncher: {gpu_type: h100}", "`launcher` (schema 1) beside schema_version: 2"),
        ("slurm: {gpu_partition: a, gpu: {partition: b}}", "slurm.gpu_partition (schema 1) beside slurm.gpu"),
        ("launcher: {account: a}\nslurm: {account: b}", "account in both `launcher` and `slurm`"),
        ("slurm: {account: a, common: {account: b}}", "slurm.account is also in slurm.common"),
        ("schema_version: 1\ngpu_type: h100", "needs a `launcher` section"),
        ("schema_version: 3", "choices are: 1, 2"),
        ("gpu_typ: h100", "did you mean gpu_type?"),
        ("install: {arch: x}", "choices are: node_architecture"),
        ("container: {picture: x}", "choices are: image, mounts, mount_home"),
        ("workloads: {config: {a: {venv: b}}}", "choices are: venv_path, venv_type, environment, slurm"),
        ("slurm: {gpu: {partion: a}}", "did you mean partition?"),
        ("slurm: {gpu: {nodes: 4}}", "nodes is set by each run"),
        ("environment: {SBATCH_OUTPUT: x}", "SBATCH_OUTPUT is set by each run"),
        ("slurm: {gpu: {gres: 8, gpus_per_node: 4}}", "gpus-per-node is given twice"),
        ('slurm: {gpu: {partition: "a\\nb"}}', "Slurm accepts no line break"),
        ("slurm: {gpu: {partition: [a, b]}}", "expected one value"),
        ("environment: {A-B: c}", "'A-B' cannot name an environment variable"),
        ('environment: {A: "\\0"}', "zero byte"),
        ("environment: [a]", "expected a mapping"),
        ("environment: {GPUS_PER_NODE: 0}", "expected a whole number above 0"),
        ("environment: {GPUS_PER_NODE: some}", "expected a whole number above 0"),
        ("environment: {ADDITIONAL_SLURM_PARAMS: 'a b=c'}", "expected key=value or a flag"),
        ("container: {mounts: ['/a,b:/c']}", "without a comma"),
        ("container: {mount_home: perhaps}", "expected true or false"),
        ("just text", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("a: b: c", "line 1: not valid YAML"),
    ],
)
def test_error_is_one_line_that_names_the_file(tmp_path, text, message):
    line = error_of(tmp_path, text)
    assert message in line
    assert CLUSTER_FILE in line


def test_folder_takes_precedence_over_the_installation(tmp_path):
    folder, install = tmp_path / "folder", tmp_path / "install"
    folder.mkdir()
    install.mkdir()
    assert find_cluster(folder, install) is None
    (install / CLUSTER_FILE).write_text("cluster_name: general")
    assert find_cluster(folder, install).name == "general"
    (folder / CLUSTER_FILE).write_text("cluster_name: own")
    assert find_cluster(folder, install).name == "own"


def test_folder_or_broken_link_in_place_of_the_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / CLUSTER_FILE).mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        find_cluster(tmp_path / "a", tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / CLUSTER_FILE).symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot read"):
        find_cluster(tmp_path / "b", tmp_path)


WORDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))
NAMES = st.from_regex(r"[A-Z]{1,8}_X", fullmatch=True)
ONE_LINE = WORDS.filter(lambda text: text.isprintable() and not text.isdigit())


@pytest.mark.slow
@given(environment=st.dictionaries(NAMES, WORDS), comment=ONE_LINE, image=ONE_LINE.filter(bool))
@example(environment={"A_X": "None", "B_X": "null", "C_X": "0123", "D_X": "1:30:00"}, comment="true", image="~")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_text_roundtrip(tmp_path, environment, comment, image):
    path = tmp_path / CLUSTER_FILE
    path.write_text(
        as_yaml({"environment": environment, "slurm": {"gpu": {"wckey": comment}}, "container": {"image": image}}),
        encoding="utf-8",
    )
    cluster = read_cluster(path)
    assert cluster.environment == environment
    assert cluster.sbatch == {"wckey": comment}
    assert cluster.container.image == image


KEYS = st.sampled_from(
    [
        "launcher", "slurm", "common", "gpu", "cpu", "environment", "install", "workloads", "installed", "config", "w",
        "container", "mounts", "image", "gres", "partition", "schema_version", "gpu_type", "gpu_partition",
        "SBATCH_QOS", "ADDITIONAL_SLURM_PARAMS", "GPUS_PER_NODE", "mount_home",
    ]
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


@pytest.mark.slow
@given(data=ANYTHING)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_any_yaml_is_read_or_refused(tmp_path, data):
    path = tmp_path / CLUSTER_FILE
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        assert read_cluster(path).path == path


def test_write_cluster_roundtrip_and_backup(tmp_path):
    path = tmp_path / CLUSTER_FILE
    path.write_text(SCHEMA_2)
    path.chmod(0o600)
    data = to_current_schema(load_yaml_as_text(path), path)
    before = read_cluster(path)
    backup = write_cluster(path, data)
    assert backup == tmp_path / f"{CLUSTER_FILE}.1"
    assert backup.read_text() == SCHEMA_2
    assert read_cluster(path) == before
    assert path.stat().st_mode & 0o777 == 0o600
    assert write_cluster(path, {**data, "cluster_name": "other"}) == tmp_path / f"{CLUSTER_FILE}.2"
    assert read_cluster(path).name == "other"
    assert sorted(file.name for file in tmp_path.iterdir()) == [CLUSTER_FILE, f"{CLUSTER_FILE}.1", f"{CLUSTER_FILE}.2"]


def test_numbers_are_unquoted_and_other_text_is_quoted(tmp_path):
    text = as_yaml({"schema_version": "2", "slurm": {"gpu": {"gres": "8", "account": "0123", "time": "1:30:00"}}})
    assert "schema_version: 2\n" in text
    assert "gres: 8\n" in text
    assert "account: '0123'\n" in text
    assert "time: '1:30:00'\n" in text


def test_invalid_data_is_not_written(tmp_path):
    path = tmp_path / CLUSTER_FILE
    path.write_text(SCHEMA_1)
    with pytest.raises(ConfigError):
        write_cluster(path, {"slurm": {"gpu": {"partition": "a\nb"}}})
    assert [file.name for file in tmp_path.iterdir()] == [CLUSTER_FILE]
    assert path.read_text() == SCHEMA_1


def test_symlink_to_a_shared_file_stays(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "site.yaml").write_text("cluster_name: old")
    (tmp_path / CLUSTER_FILE).symlink_to(shared / "site.yaml")
    write_cluster(tmp_path / CLUSTER_FILE, {"schema_version": 2, "cluster_name": "new"})
    assert (tmp_path / CLUSTER_FILE).is_symlink()
    assert read_cluster(shared / "site.yaml").name == "new"
    assert read_cluster(shared / "site.yaml.1").name == "old"


def test_missing_folder_is_a_launch_error(tmp_path):
    with pytest.raises(LaunchError, match="cannot write"):
        write_cluster(tmp_path / "gone" / CLUSTER_FILE, {"schema_version": 2})


def test_option_names():
    assert {option_name(key, "x") for key in ("mem_per_gpu", "mem-per-gpu", "SBATCH_MEM_PER_GPU")} == {"mem-per-gpu"}
    assert option_name("SBATCH_TIMELIMIT", "x") == "time"
    assert option_name("SBATCH_SEGMENT_SIZE", "x") == "segment"
    assert not OPTIONS & RESERVED_OPTIONS
    assert parse_additional_params("exclusive; --qos=high ;site-option=a=b;") == {
        "exclusive": "",
        "qos": "high",
        "site-option": "a=b",
    }


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_empty_file_is_named_as_such(tmp_path, text):
    with pytest.raises(ConfigError, match=r"cluster_config.yaml is empty; expected at least `schema_version: 2`"):
        parse(tmp_path, text)
