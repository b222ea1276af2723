"""submit, states, cancel and find against Slurm's own daemons: with accounting, without it, and while they are away."""

import subprocess
import time

import pytest
from slurm_lab import SlurmLab, unavailable_reason

from llmb.errors import ConfigError
from llmb.launch.slurm import slurm_jobs as jobs
from llmb.launch.slurm.cluster_facts import accounts, cluster_name, node_facts, parse_gpus, partitions

pytestmark = pytest.mark.slurm


@pytest.fixture
def script(tmp_path):
    """Writes a batch script with these lines; gives its path."""

    def write(*lines):
        path = tmp_path / "job.sh"
        path.write_text("\n".join(["#!/bin/bash", f"#SBATCH --output={tmp_path}/slurm-%j.out", *lines, ""]))
        return path

    return write


@pytest.fixture
def forgetful(tmp_path, monkeypatch):
    """A Slurm of the test's own, whose controller may lose its memory; questions give up soon."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    with SlurmLab(tmp_path / "lab", nodes=2, settings={"MessageTimeout": "3"}) as lab:
        for name, value in lab.environment.items():
            monkeypatch.setenv(name, value)
        yield lab


def until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def come_to(job_id, *, phase, seconds=120.0):
    end = time.monotonic() + seconds
    while True:
        state = jobs.states([job_id]).get(job_id)
        if state is not None and state.phase == phase:
            return state
        assert time.monotonic() < end, state
        time.sleep(0.1)


def lose_memory(lab):
    lab.kill_controller()
    lab.start_controller(forget=True)


def test_a_job_is_followed_from_queue_to_end(slurm, script, tmp_path):
    began = time.time()
    waits = f"until [ -e {tmp_path}/end ]; do sleep 0.1; done"
    arguments = ["--nodelist=n[1-2]", "--comment=llmb:followed", "--hold"]
    job_id = jobs.submit(script(f"{waits}; sleep 1; exit 3"), arguments)
    waiting = jobs.states([job_id])[job_id]
    assert (waiting.phase, waiting.reason, waiting.nodes) == ("pending", "JobHeldUser", None)
    slurm.call("scontrol", "release", job_id)
    assert come_to(job_id, phase="running").nodes == "n[1-2]"
    (tmp_path / "end").touch()
    ended = come_to(job_id, phase="ended")
    assert (ended.state, ended.exit_code, ended.signal, ended.restarts) == ("FAILED", 3, None, 0)
    assert (ended.nodes, ended.comment) == ("n[1-2]", "llmb:followed")
    assert began - 2 < ended.submitted_at <= ended.started_at < ended.ended_at < time.time() + 2


def test_the_script_sees_the_environment_it_is_given(slurm, script, tmp_path):
    environment = {**slurm.environment, "FROM_HERE": "a 'b' $c"}
    job_id = jobs.submit(script(f'echo -n "$FROM_HERE${{LC_ALL-}}" > {tmp_path}/seen'), [], environment)
    come_to(job_id, phase="ended")
    assert (tmp_path / "seen").read_text() == "a 'b' $c"


def test_a_killed_script_has_a_signal(slurm, script):
    ended = come_to(jobs.submit(script("kill -9 $$"), []), phase="ended")
    assert (ended.state, ended.exit_code, ended.signal) == ("FAILED", None, 9)


def test_a_requeued_job_counts_its_restarts(slurm, script):
    job_id = jobs.submit(script("sleep 60"), ["--requeue"])
    come_to(job_id, phase="running")
    slurm.call("scontrol", "requeue", job_id)
    assert come_to(job_id, phase="pending").restarts == 1
    jobs.cancel([job_id])


def test_a_lost_node_is_slurms_own_word(slurm, script):
    job_id = jobs.submit(script("sleep 60"), ["--no-requeue", "--nodelist=n4"])
    come_to(job_id, phase="running")
    slurm.down("n4")
    assert come_to(job_id, phase="ended").state == "NODE_FAIL"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes=9"], "Node count specification invalid"),
        (["--gpus-per-node=9"], "Requested node configuration is not available"),
        (["--partition=nowhere"], "invalid partition specified: nowhere"),
        (["--no-such-option"], "unrecognized option '--no-such-option'"),
        (["--time=soon"], "Invalid --time specification"),
    ],
)
def test_a_refusal_is_one_line_in_slurms_words(slurm, script, arguments, words):
    with pytest.raises(ConfigError) as refusal:
        jobs.submit(script("true"), arguments)
    assert str(refusal.value).startswith("Slurm refuses the job: ")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_many_are_asked_after_cancelled_and_asked_after_in_one_call_each(slurm, script, tmp_path, monkeypatch):
    job_ids = [jobs.submit(script("true"), ["--hold"]) for _ in range(40)]
    watched = tmp_path / "bin"
    watched.mkdir()
    for program in ("squeue", "scancel"):
        (watched / program).write_text(f'#!/bin/sh\necho {program} >> {tmp_path}/calls\nexec /usr/bin/{program} "$@"\n')
        (watched / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{watched}:{slurm.environment['PATH']}")
    assert {state.phase for state in jobs.states(job_ids).values()} == {"pending"}
    jobs.cancel(job_ids)
    after = jobs.states(job_ids)
    assert after.keys() == set(job_ids)
    assert {state.state for state in after.values()} == {"CANCELLED"}
    assert (tmp_path / "calls").read_text().split() == ["squeue", "scancel", "squeue"]


def test_what_cannot_be_cancelled_harms_nothing(slurm, script):
    ended = jobs.submit(script("true"), [])
    come_to(ended, phase="ended")
    waiting = jobs.submit(script("true"), ["--hold"])
    jobs.cancel([ended, "99999999", waiting])
    assert come_to(waiting, phase="ended").state == "CANCELLED"
    assert jobs.states(["99999999"]) == jobs.states(["99999999", "99999998", "local-1"]) == jobs.states([]) == {}


def test_the_users_own_settings_do_not_change_the_answers(slurm, script, monkeypatch):
    job_id = jobs.submit(script("true"), ["--hold"])
    for name, value in {
        "SQUEUE_STATES": "RUNNING",
        "SCANCEL_INTERACTIVE": "1",
        "SLURM_TIME_FORMAT": "relative",
    }.items():
        monkeypatch.setenv(name, value)
    assert jobs.states([job_id])[job_id].submitted_at > 1e9
    jobs.cancel([job_id])
    assert come_to(job_id, phase="ended").state == "CANCELLED"


def test_a_job_is_found_by_its_whole_comment(slurm, script):
    job_id = jobs.submit(script("true"), ["--comment=llmb:0123 4|5"])
    assert jobs.find_by_comment("llmb:0123 4|5") == job_id
    assert jobs.find_by_comment("llmb:0123 4") is None
    newer = jobs.submit(script("true"), ["--comment=llmb:0123 4|5"])
    assert jobs.find_by_comment("llmb:0123 4|5") == newer


def test_without_accounts_a_forgotten_job_is_in_the_completion_file(forgetful, script):
    job_id = jobs.submit(script("exit 7"), [])
    seen = come_to(job_id, phase="ended")
    lose_memory(forgetful)
    remembered = jobs.states([job_id])[job_id]
    assert (remembered.state, remembered.exit_code, remembered.nodes) == ("FAILED", 7, "n1")
    assert (remembered.submitted_at, remembered.ended_at) == (seen.submitted_at, seen.ended_at)
    (forgetful.folder / "log/jobcomp.txt").unlink()
    assert jobs.states([job_id]) == {}


def test_with_accounts_a_forgotten_job_is_in_them(slurm_with_accounting, script):
    lab = slurm_with_accounting
    job_id = jobs.submit(script("kill -9 $$"), ["--comment=llmb:accounted"])
    come_to(job_id, phase="ended")
    runs_on = jobs.submit(script("sleep 60"), [])
    come_to(runs_on, phase="running")
    accounted = ["sacct", "-X", "-n", "-P", "-o", "State"]
    until(lambda: lab.call(*accounted, "-j", job_id).strip() == "FAILED")
    until(lambda: lab.call(*accounted, "-j", runs_on).strip() == "RUNNING")
    lose_memory(lab)
    remembered = jobs.states([job_id, runs_on])
    assert (remembered[job_id].state, remembered[job_id].signal) == ("FAILED", 9)
    assert remembered.keys() == {job_id} or remembered[runs_on].phase == "ended", "it does not run any more"
    until(lambda: jobs.find_by_comment("llmb:accounted") == job_id)  # a search lags some seconds behind


def test_an_account_that_does_not_exist_is_refused(slurm_with_accounting, script):
    with pytest.raises(ConfigError, match=r"^Slurm refuses the job: Invalid account"):
        jobs.submit(script("true"), ["--account=nobodys"])


def test_while_the_controller_is_away_everything_says_so_in_one_line(forgetful, script):
    job_id = jobs.submit(script("true"), ["--hold", "--comment=llmb:away"])
    forgetful.wait_until_saved(job_id)
    forgetful.kill_controller()
    for question in (
        lambda: jobs.states([job_id]),
        lambda: jobs.find_by_comment("llmb:away"),
        lambda: jobs.cancel([job_id]),
        lambda: jobs.submit(script("true"), []),
        partitions,
        node_facts,
    ):
        with pytest.raises(jobs.SlurmUnavailable, match=r"^Slurm does not respond: .*$") as down:
            question()
        assert "\n" not in str(down.value)
    forgetful.start_controller()
    assert jobs.states([job_id])[job_id].phase == "pending"


def test_a_job_that_slurm_took_without_saying_so_is_found(forgetful, script):
    forgetful.freeze_controller()
    with pytest.raises(jobs.SlurmUnavailable):
        jobs.submit(script("true"), ["--comment=llmb:unanswered"])
    forgetful.thaw_controller()
    until(lambda: jobs.find_by_comment("llmb:unanswered"))


def test_a_machine_without_slurm_says_that(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(jobs.SlurmUnavailable, match="not installed on this machine: no program squeue"):
        jobs.states(["1"])


def test_a_question_has_a_time_limit(monkeypatch, tmp_path):
    from llmb.launch.slurm.slurm_command import run_slurm

    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(jobs.SlurmUnavailable, match=r"squeue took more than 0\.2 s"):
        run_slurm([str(tmp_path / "squeue")], timeout_s=0.2)


def test_a_cluster_describes_itself(slurm):
    (main,) = partitions()
    assert (main.name, main.default, main.up, main.nodes, main.max_time_s) == ("main", True, True, 4, None)
    assert parse_gpus(main.gres).count == slurm.gpus
    nodes = node_facts("main")
    machine = subprocess.check_output(["uname", "-m"], text=True).strip()
    assert (nodes.architecture, nodes.cpus, nodes.memory_mib) == (machine, 32, 16000)
    assert accounts() == []
    assert cluster_name() == "lab"


def test_accounts_are_the_users_own_with_the_default_first(slurm_with_accounting):
    slurm_with_accounting.give_accounts("research", "another")
    assert accounts()[0] == "research"
    assert set(accounts()) >= {"research", "another"}
