"""submit, states, cancel and find_by_comment with real Slurm daemons: with and without accounting, and while down."""

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
    """Return a function that writes a batch script with these lines and returns its path."""

    def write(*lines):
        path = tmp_path / "job.sh"
        path.write_text("\n".join(["#!/bin/bash", f"#SBATCH --output={tmp_path}/slurm-%j.out", *lines, ""]))
        return path

    return write


@pytest.fixture
def separate_lab(tmp_path, monkeypatch):
    """Slurm lab of one test, whose controller may lose its state; queries time out soon."""
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


def wait_for_phase(job_id, *, phase, seconds=120.0):
    end = time.monotonic() + seconds
    while True:
        state = jobs.states([job_id]).get(job_id)
        if state is not None and state.phase == phase:
            return state
        assert time.monotonic() < end, state
        time.sleep(0.1)


def reset_controller(lab):
    lab.kill_controller()
    lab.start_controller(forget=True)


def test_states_of_a_job_from_pending_to_ended(slurm, script, tmp_path):
    began = time.time()
    wait = f"until [ -e {tmp_path}/end ]; do sleep 0.1; done"
    arguments = ["--nodelist=n[1-2]", "--comment=llmb:followed", "--hold"]
    job_id = jobs.submit(script(f"{wait}; sleep 1; exit 3"), arguments)
    pending = jobs.states([job_id])[job_id]
    assert (pending.phase, pending.reason, pending.nodes) == ("pending", "JobHeldUser", None)
    slurm.call("scontrol", "release", job_id)
    assert wait_for_phase(job_id, phase="running").nodes == "n[1-2]"
    (tmp_path / "end").touch()
    ended = wait_for_phase(job_id, phase="ended")
    assert (ended.state, ended.exit_code, ended.signal, ended.restarts) == ("FAILED", 3, None, 0)
    assert (ended.nodes, ended.comment) == ("n[1-2]", "llmb:followed")
    assert began - 2 < ended.submitted_at <= ended.started_at < ended.ended_at < time.time() + 2


def test_script_sees_the_environment_of_the_submission(slurm, script, tmp_path):
    environment = {**slurm.environment, "FROM_HERE": "a 'b' $c"}
    job_id = jobs.submit(script(f'echo -n "$FROM_HERE${{LC_ALL-}}" > {tmp_path}/seen'), [], environment)
    wait_for_phase(job_id, phase="ended")
    assert (tmp_path / "seen").read_text() == "a 'b' $c"


def test_killed_script_has_a_signal(slurm, script):
    ended = wait_for_phase(jobs.submit(script("kill -9 $$"), []), phase="ended")
    assert (ended.state, ended.exit_code, ended.signal) == ("FAILED", None, 9)


def test_requeued_job_counts_its_restarts(slurm, script):
    job_id = jobs.submit(script("sleep 60"), ["--requeue"])
    wait_for_phase(job_id, phase="running")
    slurm.call("scontrol", "requeue", job_id)
    assert wait_for_phase(job_id, phase="pending").restarts == 1
    jobs.cancel([job_id])


def test_node_down_is_node_fail(slurm, script):
    job_id = jobs.submit(script("sleep 60"), ["--no-requeue", "--nodelist=n4"])
    wait_for_phase(job_id, phase="running")
    slurm.down("n4")
    assert wait_for_phase(job_id, phase="ended").state == "NODE_FAIL"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes=9"], "Node count specification invalid"),
        (["--gpus-per-node=9"], "Requested node configuration is not available"),
        (["--partition=nowhere"], "invalid partition specified: nowhere"),
        (["--no-such-option"], "unrecognized option '--no-such-option'"),
        (["--time=soon"], "Invalid --time specification"),
    ],
)
def test_refusal_is_one_line_with_slurms_message(slurm, script, arguments, message):
    with pytest.raises(ConfigError) as refusal:
        jobs.submit(script("true"), arguments)
    assert str(refusal.value).startswith("Slurm refuses the job: ")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_many_jobs_are_queried_and_cancelled_in_one_call_each(slurm, script, tmp_path, monkeypatch):
    job_ids = [jobs.submit(script("true"), ["--hold"]) for _ in range(40)]
    wrappers = tmp_path / "bin"
    wrappers.mkdir()
    for program in ("squeue", "scancel"):
        (wrappers / program).write_text(
            f'#!/bin/sh\necho {program} >> {tmp_path}/calls\nexec /usr/bin/{program} "$@"\n'
        )
        (wrappers / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrappers}:{slurm.environment['PATH']}")
    assert {state.phase for state in jobs.states(job_ids).values()} == {"pending"}
    jobs.cancel(job_ids)
    after = jobs.states(job_ids)
    assert after.keys() == set(job_ids)
    assert {state.state for state in after.values()} == {"CANCELLED"}
    assert (tmp_path / "calls").read_text().split() == ["squeue", "scancel", "squeue"]


def test_jobs_that_cannot_be_cancelled_do_not_affect_the_others(slurm, script):
    ended = jobs.submit(script("true"), [])
    wait_for_phase(ended, phase="ended")
    pending = jobs.submit(script("true"), ["--hold"])
    jobs.cancel([ended, "99999999", pending])
    assert wait_for_phase(pending, phase="ended").state == "CANCELLED"
    assert jobs.states(["99999999"]) == jobs.states(["99999999", "99999998", "local-1"]) == jobs.states([]) == {}


def test_user_settings_of_squeue_and_scancel_have_no_effect(slurm, script, monkeypatch):
    job_id = jobs.submit(script("true"), ["--hold"])
    for name, value in {
        "SQUEUE_STATES": "RUNNING",
        "SCANCEL_INTERACTIVE": "1",
        "SLURM_TIME_FORMAT": "relative",
    }.items():
        monkeypatch.setenv(name, value)
    assert jobs.states([job_id])[job_id].submitted_at > 1e9
    jobs.cancel([job_id])
    assert wait_for_phase(job_id, phase="ended").state == "CANCELLED"


def test_find_by_comment_matches_the_whole_comment(slurm, script):
    job_id = jobs.submit(script("true"), ["--comment=llmb:0123 4|5"])
    assert jobs.find_by_comment("llmb:0123 4|5") == job_id
    assert jobs.find_by_comment("llmb:0123 4") is None
    newer = jobs.submit(script("true"), ["--comment=llmb:0123 4|5"])
    assert jobs.find_by_comment("llmb:0123 4|5") == newer


def test_without_accounting_a_forgotten_job_is_in_the_completion_file(separate_lab, script):
    job_id = jobs.submit(script("exit 7"), [])
    before = wait_for_phase(job_id, phase="ended")
    reset_controller(separate_lab)
    remembered = jobs.states([job_id])[job_id]
    assert (remembered.state, remembered.exit_code, remembered.nodes) == ("FAILED", 7, "n1")
    assert (remembered.submitted_at, remembered.ended_at) == (before.submitted_at, before.ended_at)
    (separate_lab.folder / "log/jobcomp.txt").unlink()
    assert jobs.states([job_id]) == {}


def test_with_accounting_a_forgotten_job_is_in_sacct(slurm_with_accounting, script):
    lab = slurm_with_accounting
    job_id = jobs.submit(script("kill -9 $$"), ["--comment=llmb:accounted"])
    wait_for_phase(job_id, phase="ended")
    running = jobs.submit(script("sleep 60"), [])
    wait_for_phase(running, phase="running")
    sacct = ["sacct", "-X", "-n", "-P", "-o", "State"]
    until(lambda: lab.call(*sacct, "-j", job_id).strip() == "FAILED")
    until(lambda: lab.call(*sacct, "-j", running).strip() == "RUNNING")
    reset_controller(lab)
    remembered = jobs.states([job_id, running])
    assert (remembered[job_id].state, remembered[job_id].signal) == ("FAILED", 9)
    assert remembered.keys() == {job_id} or remembered[running].phase == "ended", "it no longer runs"
    until(lambda: jobs.find_by_comment("llmb:accounted") == job_id)  # a search lags by some seconds


def test_unknown_account_is_refused(slurm_with_accounting, script):
    with pytest.raises(ConfigError, match=r"^Slurm refuses the job: Invalid account"):
        jobs.submit(script("true"), ["--account=nobodys"])


def test_every_command_reports_a_controller_that_is_down_in_one_line(separate_lab, script):
    job_id = jobs.submit(script("true"), ["--hold", "--comment=llmb:away"])
    separate_lab.wait_until_saved(job_id)
    separate_lab.kill_controller()
    for command in (
        lambda: jobs.states([job_id]),
        lambda: jobs.find_by_comment("llmb:away"),
        lambda: jobs.cancel([job_id]),
        lambda: jobs.submit(script("true"), []),
        partitions,
        node_facts,
    ):
        with pytest.raises(jobs.SlurmUnavailable, match=r"^Slurm does not respond: .*$") as down:
            command()
        assert "\n" not in str(down.value)
    separate_lab.start_controller()
    assert jobs.states([job_id])[job_id].phase == "pending"


def test_job_accepted_without_a_response_is_found_by_comment(separate_lab, script):
    separate_lab.freeze_controller()
    with pytest.raises(jobs.SlurmUnavailable):
        jobs.submit(script("true"), ["--comment=llmb:unanswered"])
    separate_lab.thaw_controller()
    until(lambda: jobs.find_by_comment("llmb:unanswered"))


def test_machine_without_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(jobs.SlurmUnavailable, match="not installed on this machine: no program squeue"):
        jobs.states(["1"])


def test_slurm_command_has_a_timeout(monkeypatch, tmp_path):
    from llmb.launch.slurm.slurm_command import run_slurm

    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(jobs.SlurmUnavailable, match=r"squeue took more than 0\.2 s"):
        run_slurm([str(tmp_path / "squeue")], timeout_s=0.2)


def test_cluster_facts(slurm):
    (main,) = partitions()
    assert (main.name, main.default, main.up, main.nodes, main.max_time_s) == ("main", True, True, 4, None)
    assert parse_gpus(main.gres).count == slurm.gpus
    nodes = node_facts("main")
    machine = subprocess.check_output(["uname", "-m"], text=True).strip()
    assert (nodes.architecture, nodes.cpus, nodes.memory_mib) == (machine, 32, 16000)
    assert accounts() == []
    assert cluster_name() == "lab"


def test_accounts_of_the_user_with_the_default_first(slurm_with_accounting):
    slurm_with_accounting.give_accounts("research", "another")
    assert accounts()[0] == "research"
    assert set(accounts()) >= {"research", "another"}
