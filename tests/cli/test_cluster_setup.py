"""llmb-install: choices, questions, saved answers and answer files, from facts as Slurm reports them, without Slurm."""

from pathlib import Path

import pytest

from llmb.cli.install.cluster_answers import (
    AnswerFile,
    Answers,
    SavedAnswers,
    answer_file_text,
    check,
    read_answer_file,
)
from llmb.cli.install.cluster_choice import ClusterFacts, complete_answers, terminal_prompt
from llmb.cli.install.cluster_setup import set_up_cluster
from llmb.errors import ConfigError
from llmb.launch.slurm.cluster_config import CLUSTER_FILE, read_cluster
from llmb.launch.slurm.cluster_facts import Partition

TOKEN = "hf_" + "a" * 30


def partition(name: str, gres: str | None = None, default: bool = False, nodes: int = 4, up: bool = True) -> Partition:
    return Partition(name=name, default=default, up=up, nodes=nodes, gres=gres, max_time_s=None)


def facts(*partitions: Partition, accounts: tuple[str, ...] = ()) -> ClusterFacts:
    return ClusterFacts(cluster="big", accounts=accounts, partitions=partitions, architecture=lambda name: "x86_64")


H100 = partition("batch", "gpu:h100:8(S:0-1)")
PLAIN = partition("plain", "gpu:4")
SMALL = partition("small", default=True)


class ScriptedPrompt:
    """Prompt that answers from a list and records the questions."""

    def __init__(self, *answers: str):
        self.answers = list(answers)
        self.fields: list[str] = []

    def __call__(self, field, question, choices):
        self.fields.append(field)
        answer = self.answers.pop(0)
        assert answer in choices
        return answer


def no_prompt(field, question, choices):
    raise AssertionError(f"asked for {field}")


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (facts(H100), Answers(gpu_partition="batch", cpu_partition="batch", gpus_per_node=8, gpu_type="h100")),
        (
            facts(SMALL, H100, accounts=("mine", "ours")),
            Answers(account="mine", gpu_partition="batch", cpu_partition="small", gpus_per_node=8, gpu_type="h100"),
        ),
        (
            facts(
                H100, partition("main", "gpu:nvidia_gb200:4", default=True), partition("c1"), partition("c2", nodes=9)
            ),
            Answers(gpu_partition="main", cpu_partition="c2", gpus_per_node=4, gpu_type="gb200"),
        ),
        (facts(SMALL), Answers(gpu_partition="small", cpu_partition="small", gpus_per_node=0, gpu_type="cpu")),
        (
            facts(H100, partition("old", "gpu:a100:8", up=False)),
            Answers(gpu_partition="batch", cpu_partition="batch", gpus_per_node=8, gpu_type="h100"),
        ),
    ],
)
def test_facts_from_slurm_are_not_asked(cluster, expected):
    assert complete_answers(Answers(), cluster, no_prompt) == expected.with_defaults(Answers(architecture="x86_64"))


def test_only_open_questions_are_asked():
    ask = ScriptedPrompt("plain", "h200")
    answers = complete_answers(Answers(), facts(H100, PLAIN), ask)
    assert ask.fields == ["gpu_partition", "gpu_type"]
    assert (answers.gpu_partition, answers.gpus_per_node, answers.gpu_type) == ("plain", 4, "h200")
    ask = ScriptedPrompt("h200")
    assert (
        complete_answers(Answers(gpu_partition="plain,batch"), facts(H100, PLAIN), ask).gpu_partition == "plain,batch"
    )
    assert ask.fields == ["gpu_type"]


@pytest.mark.parametrize("choice", ["h100", "cpu"])
def test_gpu_type_that_is_not_in_the_table_is_asked(choice):
    ask = ScriptedPrompt(choice)
    answers = complete_answers(Answers(), facts(partition("batch", "gpu:h100_sxm_64gb:2")), ask)
    assert (ask.fields, answers.gpu_type) == (["gpu_type"], choice)


def test_gpu_type_that_is_not_in_the_table_can_be_chosen_by_slurms_name():
    answers = complete_answers(Answers(), facts(partition("batch", "gpu:nvidia_l40:4")), ScriptedPrompt("unlisted:l40"))
    assert check(answers).gpu_type == "unlisted:l40"
    with pytest.raises(ConfigError, match="unknown GPU type 'l40'; choices are"):
        check(Answers(gpu_type="l40"))


def test_no_partition_is_up():
    with pytest.raises(ConfigError, match="no partition that is up"):
        complete_answers(Answers(), facts(partition("a", up=False)), no_prompt)


def test_terminal_prompt_asks_until_the_answer_is_valid(capsys):
    lines = iter(["\n", "9\n", "no\n", "2\n"])
    ask = terminal_prompt(lambda: next(lines), at_terminal=True)
    assert ask("gpu_type", "Which?", ["h100", "h200"]) == "h200"
    printed = capsys.readouterr()
    assert printed.err.count("--gpu-type") == 4
    assert printed.out == ""  # reserved for the findings


@pytest.mark.parametrize(
    "ask", [terminal_prompt(lambda: "", at_terminal=True), terminal_prompt(lambda: "1", at_terminal=False)]
)
def test_without_a_terminal_the_error_names_the_option(ask):
    with pytest.raises(ConfigError, match=r"--gpu-type NAME, one of: h100, h200"):
        ask("gpu_type", "Which?", ["h100", "h200"])


def make(
    root: Path,
    cluster: ClusterFacts,
    options: Answers | None = None,
    ask=no_prompt,
    answer_file: AnswerFile | None = None,
    dry=False,
):
    root.mkdir(exist_ok=True)
    saved_answers = SavedAnswers(None if dry else root / "answers.json")
    return set_up_cluster(options or Answers(), answer_file or AnswerFile(), root, cluster, ask, saved_answers, dry)


def test_new_file_holds_the_facts(tmp_path):
    setup = make(tmp_path, facts(SMALL, H100, accounts=("mine",)))
    assert (setup.path, setup.state) == (tmp_path / CLUSTER_FILE, "written")
    cluster = read_cluster(setup.path)
    assert (cluster.name, cluster.gpu_type, cluster.architecture) == ("big", "h100", "x86_64")
    assert cluster.sbatch == {"account": "mine", "partition": "batch", "gpus-per-node": "8"}
    assert cluster.cpu_sbatch == {"account": "mine", "partition": "small"}
    assert setup.path.read_text() == setup.text
    assert "common" not in setup.text  # NVIDIA's tools do not read such a block
    assert [file.name for file in tmp_path.iterdir()] == [CLUSTER_FILE]


def test_second_setup_changes_nothing_and_asks_nothing(tmp_path):
    make(tmp_path, facts(H100))
    edited = "# mine\n" + (tmp_path / CLUSTER_FILE).read_text().replace("gres: 8", "gres: 4  # half")
    (tmp_path / CLUSTER_FILE).write_text(edited)
    setup = make(tmp_path, facts(PLAIN, SMALL))  # Slurm reports something else by now
    assert setup.state == "kept"
    assert setup.answers.gpus_per_node == 4
    assert (tmp_path / CLUSTER_FILE).read_text() == edited


def test_option_changes_only_its_setting_in_the_file(tmp_path):
    text = """
# by hand
launcher: {gpu_type: h100, llmb_install: /x, llmb_repo: /y}
slurm: {account: all, gpu_partition: old, gpu_gres: 2, qos: high}
environment: {NOTE: "a\\nb"}
workloads: {config: {w: {environment: {A: b}}}}
"""
    (tmp_path / CLUSTER_FILE).write_text(text)
    setup = make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch", account="other"))
    cluster = read_cluster(tmp_path / CLUSTER_FILE)
    assert cluster.sbatch == {"account": "other", "qos": "high", "partition": "batch", "gpus-per-node": "8"}
    assert (cluster.gpu_type, cluster.environment) == ("h100", {"NOTE": "a\nb"})
    assert cluster.workloads["w"].environment == {"A": "b"}
    assert (tmp_path / f"{CLUSTER_FILE}.1").read_text() == text
    assert setup.notes == (f"backup of the previous file: {tmp_path / CLUSTER_FILE}.1",)
    second = make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch", account="other"))
    assert second.state == "kept"


def test_option_replaces_any_spelling_in_the_file(tmp_path):
    (tmp_path / CLUSTER_FILE).write_text("slurm: {gpu: {SBATCH_PARTITION: plain, gpus_per_node: 4, account: a}}")
    make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch", account="b"))
    assert read_cluster(tmp_path / CLUSTER_FILE).sbatch == {"account": "b", "partition": "batch", "gpus-per-node": "8"}


def test_option_without_effect_is_refused(tmp_path):
    text = "environment: {SBATCH_PARTITION: plain}"
    (tmp_path / CLUSTER_FILE).write_text(text)
    with pytest.raises(ConfigError, match="keeps gpu_partition at plain"):
        make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch"))
    assert (tmp_path / CLUSTER_FILE).read_text() == text


def test_invalid_file_is_not_changed(tmp_path):
    (tmp_path / CLUSTER_FILE).write_text("slurm: {gpu: {partion: a}}")
    with pytest.raises(ConfigError, match="did you mean partition"):
        make(tmp_path, facts(H100), Answers(account="a"))
    assert [file.name for file in tmp_path.iterdir()] == [CLUSTER_FILE]


def test_secret_in_the_file_is_reported_but_not_removed(tmp_path):
    text = f"environment: {{HF_TOKEN: {TOKEN}}}"
    (tmp_path / CLUSTER_FILE).write_text(text)
    setup = make(tmp_path, facts(H100))
    assert (tmp_path / CLUSTER_FILE).read_text() == text
    assert any("contains the secret HF_TOKEN" in note and TOKEN not in note for note in setup.notes)


def test_dry_run_writes_nothing(tmp_path):
    setup = make(tmp_path, facts(PLAIN), ask=ScriptedPrompt("h100"), dry=True)
    assert (setup.state, list(tmp_path.iterdir())) == ("would be written", [])
    assert "partition: plain" in setup.text


def test_answers_are_saved_until_the_setup_is_complete(tmp_path):
    class Killed(BaseException):
        pass

    def killed_at_gpu_type(field, question, choices):
        if field == "gpu_partition":
            return "plain"
        raise Killed

    with pytest.raises(Killed):
        make(tmp_path, facts(H100, PLAIN), ask=killed_at_gpu_type)
    assert not (tmp_path / CLUSTER_FILE).exists()
    ask = ScriptedPrompt("h200")
    setup = make(tmp_path, facts(H100, PLAIN), ask=ask)
    assert (ask.fields, setup.answers.gpu_partition) == (["gpu_type"], "plain")
    assert [file.name for file in tmp_path.iterdir()] == [CLUSTER_FILE]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"gpu_partition": "gone"}', '{"gpu_type": 3}', '{"gpu_type": "abacus"}', '{"other": 1}']
)
def test_invalid_saved_answers_are_asked_again(tmp_path, text):
    (tmp_path / "answers.json").write_text(text)
    ask = ScriptedPrompt("h200")
    assert make(tmp_path, facts(PLAIN), ask=ask).answers.gpu_type == "h200"


def test_recorded_answer_file_can_be_played(tmp_path):
    first = make(
        tmp_path / "a", facts(SMALL, H100, PLAIN, accounts=("it's mine",)), ask=ScriptedPrompt("plain", "h200")
    )
    variables = {"NCCL_DEBUG": "INFO", "TEXT": 'a "b"\n c', "HF_TOKEN": TOKEN}
    text = answer_file_text(first.answers, tmp_path / "b c", variables, ("pretrain_grok1",))
    assert TOKEN not in text
    (tmp_path / "answers.yaml").write_text(text)
    answer_file = read_answer_file(tmp_path / "answers.yaml")
    assert answer_file.answers == first.answers
    assert answer_file.install_path == tmp_path / "b c"
    assert answer_file.environment == {"NCCL_DEBUG": "INFO", "TEXT": 'a "b"\n c'}
    make(tmp_path / "b", facts(SMALL, H100, PLAIN), answer_file=answer_file)
    first_cluster, second_cluster = (
        read_cluster(tmp_path / "a" / CLUSTER_FILE),
        read_cluster(tmp_path / "b" / CLUSTER_FILE),
    )
    assert (first_cluster.sbatch, first_cluster.cpu_sbatch, first_cluster.gpu_type) == (
        second_cluster.sbatch,
        second_cluster.cpu_sbatch,
        second_cluster.gpu_type,
    )
    assert (second_cluster.environment, second_cluster.installed) == (answer_file.environment, ("pretrain_grok1",))


def test_answer_file_of_nvidias_installer(tmp_path):
    (tmp_path / "p.yaml").write_text(
        "venv_type: venv\ninstall_path: /lustre/llmb\ninstall_method: slurm\ngpu_type: H100\nnode_architecture: arm64\n"
        "slurm: {account: a, gpu_partition: batch, cpu_partition: small, gpu_partition_gres: 8, cpu_partition_gres: }\n"
        f"selected_workloads: [pretrain_grok1]\nenvironment_vars: {{HF_TOKEN: {TOKEN}, A: b}}\n"
    )
    answer_file = read_answer_file(tmp_path / "p.yaml")
    assert answer_file.answers == Answers(
        account="a",
        gpu_partition="batch",
        cpu_partition="small",
        gpus_per_node=8,
        gpu_type="h100",
        architecture="aarch64",
    )
    assert answer_file.environment == {"A": "b"}
    assert len(answer_file.notes) == 3
    assert not any(TOKEN in note for note in answer_file.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_typ: h100", "did you mean gpu_type?"),
        ("gpu_type: abacus", "unknown GPU type 'abacus'"),
        ("slurm: {partition: a}", "choices are: account, gpu_partition"),
        ("slurm: {gpu_partition_gres: many}", "expected a whole number"),
        ("slurm: {account: [a]}", "expected one value"),
        ("selected_workloads: all", "expected a list"),
        ("- a", "expected a mapping"),
    ],
)
def test_invalid_answer_file_is_one_line(tmp_path, text, message):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_answer_file(tmp_path / "p.yaml")
    assert message in str(caught.value)


def test_negative_number_of_gpus_is_refused():
    with pytest.raises(ConfigError, match="expected a whole number"):
        check(Answers(gpus_per_node=-1))
