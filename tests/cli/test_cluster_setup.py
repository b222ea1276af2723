"""What llmb-install chooses, asks, keeps and plays again; on facts as Slurm gives them, without Slurm."""

import json
import os
import stat
from pathlib import Path

import pytest

from llmb.cli.install.cluster_answers import Answers, Notebook, Played, check, read_played, recorded
from llmb.cli.install.cluster_choice import Facts, asker, complete
from llmb.cli.install.cluster_setup import set_up
from llmb.cli.install.llmb_install import main
from llmb.errors import ConfigError
from llmb.launch.slurm.cluster_config import FILE, read_cluster
from llmb.launch.slurm.cluster_facts import Partition

TOKEN = "hf_" + "a" * 30


def partition(name: str, gres: str | None = None, default: bool = False, nodes: int = 4, up: bool = True) -> Partition:
    return Partition(name=name, default=default, up=up, nodes=nodes, gres=gres, max_time_s=None)


def facts(*partitions: Partition, accounts: tuple[str, ...] = ()) -> Facts:
    return Facts(cluster="big", accounts=accounts, partitions=partitions, architecture=lambda name: "x86_64")


H100 = partition("batch", "gpu:h100:8(S:0-1)")
PLAIN = partition("plain", "gpu:4")
SMALL = partition("small", default=True)


class Asked:
    """Answers from a list, and remembers the questions."""

    def __init__(self, *answers: str):
        self.answers = list(answers)
        self.fields: list[str] = []

    def __call__(self, field, question, choices):
        self.fields.append(field)
        answer = self.answers.pop(0)
        assert answer in choices
        return answer


def nobody(field, question, choices):
    raise AssertionError(f"asked for {field}")


@pytest.mark.parametrize(
    ("there", "expected"),
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
def test_what_slurm_tells_is_not_asked(there, expected):
    assert complete(Answers(), there, nobody) == expected.over(Answers(architecture="x86_64"))


def test_only_what_is_open_is_asked():
    ask = Asked("plain", "h200")
    found = complete(Answers(), facts(H100, PLAIN), ask)
    assert ask.fields == ["gpu_partition", "gpu_type"]
    assert (found.gpu_partition, found.gpus_per_node, found.gpu_type) == ("plain", 4, "h200")
    ask = Asked("h200")
    assert complete(Answers(gpu_partition="plain,batch"), facts(H100, PLAIN), ask).gpu_partition == "plain,batch"
    assert ask.fields == ["gpu_type"]


def test_a_card_that_only_resembles_one_of_the_table_is_asked_for():
    ask = Asked("h100")
    complete(Answers(), facts(partition("batch", "gpu:h100_pcie:2")), ask)
    assert ask.fields == ["gpu_type"]


def test_no_partition_is_up():
    with pytest.raises(ConfigError, match="no partition that is up"):
        complete(Answers(), facts(partition("a", up=False)), nobody)


def test_the_terminal_is_asked_until_the_answer_fits(capsys):
    lines = iter(["\n", "9\n", "no\n", "2\n"])
    ask = asker(lambda: next(lines), at_terminal=True)
    assert ask("gpu_type", "Which?", ["h100", "h200"]) == "h200"
    said = capsys.readouterr()
    assert said.err.count("--gpu-type") == 4
    assert said.out == ""  # that is for the findings


@pytest.mark.parametrize("ask", [asker(lambda: "", at_terminal=True), asker(lambda: "1", at_terminal=False)])
def test_nobody_to_ask_is_one_line_with_the_option(ask):
    with pytest.raises(ConfigError, match=r"--gpu-type NAME, one of: h100, h200"):
        ask("gpu_type", "Which?", ["h100", "h200"])


def make(root: Path, there: Facts, wishes: Answers | None = None, ask=nobody, played: Played | None = None, dry=False):
    root.mkdir(exist_ok=True)
    notebook = Notebook(None if dry else root / "answers.json")
    return set_up(wishes or Answers(), played or Played(), root, there, ask, notebook, dry)


def test_a_new_file_says_what_was_found(tmp_path):
    setup = make(tmp_path, facts(SMALL, H100, accounts=("mine",)))
    assert (setup.path, setup.state) == (tmp_path / FILE, "written")
    cluster = read_cluster(setup.path)
    assert (cluster.name, cluster.gpu_type, cluster.architecture) == ("big", "h100", "x86_64")
    assert cluster.sbatch == {"account": "mine", "partition": "batch", "gpus-per-node": "8"}
    assert cluster.cpu_sbatch == {"account": "mine", "partition": "small"}
    assert setup.path.read_text() == setup.text
    assert "common" not in setup.text  # NVIDIA's reader knows no such block
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_second_time_changes_nothing_and_asks_nothing(tmp_path):
    make(tmp_path, facts(H100))
    edited = "# mine\n" + (tmp_path / FILE).read_text().replace("gres: 8", "gres: 4  # half")
    (tmp_path / FILE).write_text(edited)
    setup = make(tmp_path, facts(PLAIN, SMALL))  # Slurm tells something else by now
    assert setup.state == "kept"
    assert setup.answers.gpus_per_node == 4
    assert (tmp_path / FILE).read_text() == edited


def test_an_option_changes_the_file_and_nothing_else_in_it(tmp_path):
    text = """
# by hand
launcher: {gpu_type: h100, llmb_install: /x, llmb_repo: /y}
slurm: {account: all, gpu_partition: old, gpu_gres: 2, qos: high}
environment: {NOTE: "a\\nb"}
workloads: {config: {w: {environment: {A: b}}}}
"""
    (tmp_path / FILE).write_text(text)
    setup = make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch", account="other"))
    cluster = read_cluster(tmp_path / FILE)
    assert cluster.sbatch == {"account": "other", "qos": "high", "partition": "batch", "gpus-per-node": "8"}
    assert (cluster.gpu_type, cluster.environment) == ("h100", {"NOTE": "a\nb"})
    assert cluster.workloads["w"].environment == {"A": "b"}
    assert (tmp_path / f"{FILE}.1").read_text() == text
    assert setup.notes == (f"the file as it was: {tmp_path / FILE}.1",)
    again = make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch", account="other"))
    assert again.state == "kept"


def test_an_option_goes_to_where_the_file_spells_it(tmp_path):
    (tmp_path / FILE).write_text("slurm: {gpu: {SBATCH_PARTITION: plain, gpus_per_node: 4, account: a}}")
    make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch", account="b"))
    assert read_cluster(tmp_path / FILE).sbatch == {"account": "b", "partition": "batch", "gpus-per-node": "8"}


def test_an_option_that_would_have_no_effect_is_refused(tmp_path):
    text = "environment: {SBATCH_PARTITION: plain}"
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match="keeps gpu_partition at plain"):
        make(tmp_path, facts(H100, PLAIN), Answers(gpu_partition="batch"))
    assert (tmp_path / FILE).read_text() == text


def test_a_file_with_a_mistake_is_not_touched(tmp_path):
    (tmp_path / FILE).write_text("slurm: {gpu: {partion: a}}")
    with pytest.raises(ConfigError, match="did you mean partition"):
        make(tmp_path, facts(H100), Answers(account="a"))
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_secret_in_the_file_is_said_but_left(tmp_path):
    text = f"environment: {{HF_TOKEN: {TOKEN}}}"
    (tmp_path / FILE).write_text(text)
    setup = make(tmp_path, facts(H100))
    assert (tmp_path / FILE).read_text() == text
    assert any("holds HF_TOKEN" in note and TOKEN not in note for note in setup.notes)


def test_a_dry_run_writes_nothing(tmp_path):
    setup = make(tmp_path, facts(PLAIN), ask=Asked("h100"), dry=True)
    assert (setup.state, list(tmp_path.iterdir())) == ("would be written", [])
    assert "partition: plain" in setup.text


def test_answers_are_kept_until_the_set_up_is_complete(tmp_path):
    class Killed(BaseException):
        pass

    def dies(field, question, choices):
        if field == "gpu_partition":
            return "plain"
        raise Killed

    with pytest.raises(Killed):
        make(tmp_path, facts(H100, PLAIN), ask=dies)
    assert not (tmp_path / FILE).exists()
    ask = Asked("h200")
    setup = make(tmp_path, facts(H100, PLAIN), ask=ask)
    assert (ask.fields, setup.answers.gpu_partition) == (["gpu_type"], "plain")
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "held", ["", "{", "[]", '{"gpu_partition": "gone"}', '{"gpu_type": 3}', '{"gpu_type": "abacus"}', '{"other": 1}']
)
def test_kept_answers_that_make_no_sense_are_asked_again(tmp_path, held):
    (tmp_path / "answers.json").write_text(held)
    ask = Asked("h200")
    assert make(tmp_path, facts(PLAIN), ask=ask).answers.gpu_type == "h200"


def test_what_is_recorded_can_be_played(tmp_path):
    first = make(tmp_path / "a", facts(SMALL, H100, PLAIN, accounts=("it's mine",)), ask=Asked("plain", "h200"))
    variables = {"NCCL_DEBUG": "INFO", "TEXT": 'a "b"\n c', "HF_TOKEN": TOKEN}
    text = recorded(first.answers, tmp_path / "b c", variables, ("pretrain_grok1",))
    assert TOKEN not in text
    (tmp_path / "answers.yaml").write_text(text)
    played = read_played(tmp_path / "answers.yaml")
    assert played.answers == first.answers
    assert played.install_path == tmp_path / "b c"
    assert played.environment == {"NCCL_DEBUG": "INFO", "TEXT": 'a "b"\n c'}
    make(tmp_path / "b", facts(SMALL, H100, PLAIN), played=played)
    one, two = read_cluster(tmp_path / "a" / FILE), read_cluster(tmp_path / "b" / FILE)
    assert (one.sbatch, one.cpu_sbatch, one.gpu_type) == (two.sbatch, two.cpu_sbatch, two.gpu_type)
    assert (two.environment, two.installed) == (played.environment, ("pretrain_grok1",))


def test_a_file_of_nvidias_installer_is_played(tmp_path):
    (tmp_path / "p.yaml").write_text(
        "venv_type: venv\ninstall_path: /lustre/llmb\ninstall_method: slurm\ngpu_type: H100\nnode_architecture: arm64\n"
        "slurm: {account: a, gpu_partition: batch, cpu_partition: small, gpu_partition_gres: 8, cpu_partition_gres: }\n"
        f"selected_workloads: [pretrain_grok1]\nenvironment_vars: {{HF_TOKEN: {TOKEN}, A: b}}\n"
    )
    played = read_played(tmp_path / "p.yaml")
    assert played.answers == Answers(
        account="a",
        gpu_partition="batch",
        cpu_partition="small",
        gpus_per_node=8,
        gpu_type="h100",
        architecture="aarch64",
    )
    assert played.environment == {"A": "b"}
    assert len(played.notes) == 3
    assert not any(TOKEN in note for note in played.notes)


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_a_mistake_in_a_played_file_is_one_line(tmp_path, text, said):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_played(tmp_path / "p.yaml")
    assert said in str(caught.value)


def test_an_absurd_number_of_gpus_is_refused():
    with pytest.raises(ConfigError, match="expected a whole number"):
        check(Answers(gpus_per_node=-1))


@pytest.fixture
def without_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def install(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_without_slurm_the_folder_is_made_and_runs_are_local(without_slurm, tmp_path, capsys):
    code, out, _ = install(capsys)
    assert code == 0
    assert "not found: runs are local" in out
    assert (tmp_path / "llmb" / ".llmb" / "jobs.sqlite3").exists()
    assert not (tmp_path / "llmb" / FILE).exists()
    code, out, _ = install(capsys, "--json")
    assert json.loads(out)["cluster"] is None


def test_without_slurm_a_dry_run_makes_not_even_the_folder(without_slurm, tmp_path, capsys):
    assert install(capsys, "--dry-run")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [("--partition", "a"), ("--gpus-per-node", "8"), ("--record", "r.yaml")])
def test_without_slurm_an_answer_has_no_use(without_slurm, capsys, option):
    code, _, err = install(capsys, *option)
    assert (code, err.count("\n")) == (1, 1)
    assert "no Slurm on this machine" in err


def test_a_slurm_that_does_not_answer(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("sbatch", "scontrol", "sinfo", "sacctmgr"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'slurm_load: Unable to contact slurm controller' >&2\nexit 1\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    code, out, _ = install(capsys)
    assert code == 0
    assert "does not answer now" in out
    code, _, err = install(capsys, "--partition", "a")
    assert (code, err.count("\n")) == (2, 1)


def test_a_recorded_file_is_never_written_over(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("precious")
    code, _, err = install(capsys, "--record", str(tmp_path / "mine.yaml"))
    assert (code, (tmp_path / "mine.yaml").read_text()) == (1, "precious")
    assert "exists already" in err


def test_two_folders_that_contradict_one_another(tmp_path, capsys):
    (tmp_path / "p.yaml").write_text("install_path: /elsewhere")
    code, _, err = install(capsys, "--play", str(tmp_path / "p.yaml"))
    assert code == 1
    assert "/elsewhere" in err
    assert os.environ["LLMB_INSTALL"] in err
