"""Diagnosis of failures from real log lines of Slurm, pyxis, CUDA, NCCL and torch."""

import dataclasses
import typing
from datetime import datetime

import pytest
from failed_runs import failed, job, ranks
from hypothesis import given
from hypothesis import strategies as st

from llmb.events import RunEnded, append
from llmb.launch.failure import Failure, diagnose, diagnose_run
from llmb.launch.failure_symptoms import FailureKind
from llmb.launch.run_folder import RunFolder
from llmb.launch.verdict import Verdict, finished_run_verdict

STEP_OOM = """\
slurmstepd-n2: error: Detected 1 oom-kill event(s) in StepId=15.0. Some of your processes may have been killed by ...
srun: error: n2: task 3: Out Of Memory
srun: launch/slurm: _step_signal: Terminating StepId=15.0
slurmstepd-n1: error: *** STEP 15.0 ON n1 CANCELLED AT 2026-11-15T12:39:51 ***
srun: error: n1: tasks 0-1: Terminated
"""
NODE_LOST = """\
srun: error: Node failure on n2
slurmstepd-n1: error: *** JOB 19 ON n1 CANCELLED AT 2026-11-15T12:39:59 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR ...
srun: Job step aborted: Waiting up to 4 seconds for job step to finish.
"""
KILLED = """\
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=16.0
srun: error: n1: tasks 0-1: Terminated
"""


@pytest.mark.parametrize(
    ("state", "kind", "retryable", "message"),
    [
        ("NODE_FAIL", "node_failure", True, "a node went down (NODE_FAIL), one of n[1-2]"),
        ("BOOT_FAIL", "node_failure", True, "BOOT_FAIL"),
        ("PREEMPTED", "preemption", True, "higher priority (PREEMPTED)"),
        ("TIMEOUT", "time_limit", False, "time limit was reached (TIMEOUT)"),
        ("DEADLINE", "time_limit", False, "DEADLINE"),
        ("OUT_OF_MEMORY", "oom_kill", False, "exceeding host memory (OUT_OF_MEMORY)"),
        ("CANCELLED", "cancelled", False, "cancelled (CANCELLED)"),
        ("CANCELLED by 1000", "cancelled", False, "cancelled (CANCELLED)"),
    ],
)
@pytest.mark.parametrize("end", [None, failed("interrupted by SIGTERM", status="incomplete"), failed("exit code 143")])
def test_slurm_state_determines_the_kind(state, kind, retryable, message, end):
    failure = diagnose(end, job(state))
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == (kind, retryable, ())
    assert message in failure.reason


def test_successful_or_running_run_has_no_failure():
    assert diagnose(failed(None, status="ok"), job("COMPLETED")) is None
    assert diagnose(failed(None, status="ok"), job("TIMEOUT")) is None
    assert diagnose(None, job("RUNNING", phase="running")) is None
    assert diagnose(None, job("PENDING", phase="pending")) is None


def test_node_failure_names_the_node_and_its_ranks():
    failure = diagnose(None, job("NODE_FAIL"), NODE_LOST, ranks())
    reason = "node n2 went down (NODE_FAIL); ranks 2-3 were on it"
    assert failure == Failure("node_failure", reason, True, ("n2",))
    single = diagnose(None, job("NODE_FAIL"), NODE_LOST, ranks(hosts=("n1", "n2")))
    assert single.reason == "node n2 went down (NODE_FAIL); rank 1 was on it"


def test_node_failure_without_a_log():
    failure = diagnose(None, job("NODE_FAIL"), "", ranks(silent=(2, 3)))
    assert failure.excluded_nodes == ("n2",)
    all_silent = diagnose(None, job("NODE_FAIL"), "", ranks(silent=(0, 1, 2, 3)))
    assert all_silent.excluded_nodes == ()


def test_cancel_reason_in_the_log_of_a_running_job():
    end = failed("interrupted by SIGTERM", status="incomplete")
    running = job("RUNNING", phase="running")
    due = "slurmstepd: error: *** JOB 21 ON n1 CANCELLED AT 2026-11-15T12:40:18 DUE TO {} ***\n"
    assert diagnose(end, running, due.format("TIME LIMIT")).kind == "time_limit"
    assert diagnose(end, None, due.format("PREEMPTION")).kind == "preemption"
    assert diagnose(end, None, "").kind == "cancelled"
    by_slurm = failed("ended by Slurm with SIGTERM: cancelled or preempted", status="incomplete")
    assert diagnose(by_slurm, job("PREEMPTED")).kind == "preemption"
    assert diagnose(by_slurm, None).kind == "cancelled"
    assert diagnose(failed("stopped after the time limit of 5 s", status="timeout")).kind == "time_limit"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("interrupted by SIGUSR1 after step 3", "timeout"),
        ("interrupted by SIGTERM after step 3", "incomplete"),
        ("llmb-run ended before the run did", "incomplete"),
    ],
)
def test_ranks_stopped_after_the_job_runner_was_killed(reason, status):
    failure = diagnose(
        failed(reason, status=status), job("FAILED", reason="JobLaunchFailure", exit_code=None, signal=9)
    )
    assert (failure.kind, failure.retryable) == ("killed", False)
    assert failure.reason == f"the job runner was killed; its ranks: {reason}"


def test_log_of_an_earlier_start_of_a_requeued_job_does_not_count():
    end = failed("rank 2: ValueError: no such layer", 2)
    assert diagnose(end, job("FAILED", restarts=1), NODE_LOST).kind == "program_error"
    assert diagnose(None, job("NODE_FAIL", restarts=1), NODE_LOST).excluded_nodes == ("n2",)


@pytest.mark.parametrize("end", [None, failed("ended by Slurm with SIGTERM: node failure", status="incomplete")])
def test_node_failure_whose_requeue_could_not_start(end):
    requeued = job("FAILED", restarts=1, exit_code=None, signal=None, nodes=None)
    failure = diagnose(end, requeued, NODE_LOST, newest_start_began=False)
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("node_failure", True, ("n2",))
    without_log = diagnose(end, requeued, newest_start_began=False)
    assert (without_log.kind, without_log.retryable) == ("node_failure", True)
    assert "FAILED after a requeue, before the run could start again" in without_log.reason
    preempted = NODE_LOST.splitlines()[1].replace("NODE FAILURE, SEE SLURMCTLD LOG FOR ...", "PREEMPTION ***")
    assert diagnose(end, requeued, preempted, newest_start_began=False).kind == "preemption"
    assert diagnose(end, job("CANCELLED", restarts=1), NODE_LOST, newest_start_began=False).kind == "cancelled"


@pytest.mark.parametrize(("allocation", "kind"), [(None, "node_failure"), (0, "node_failure"), (1, "program_error")])
def test_newest_start_is_known_by_its_allocation(tmp_path, config, allocation, kind):
    run = RunFolder.create(tmp_path, config, datetime(2026, 11, 15))
    if allocation is not None:
        run.allocation.write_text(f'{{"restarts": {allocation}}}')
    run.slurm_output("7").write_text(NODE_LOST)
    assert diagnose_run(run, job("FAILED", restarts=1)).kind == kind


def test_killed_supervisor_is_not_cancelled():
    end = RunEnded(status="incomplete", reason="interrupted by SIGTERM after step 3")
    verdict = finished_run_verdict(None, [end], "")
    assert verdict.status == "failed"
    assert verdict.reason == "the supervisor of the engine was killed; its ranks: interrupted by SIGTERM after step 3"
    failure = diagnose(verdict, job("FAILED"), "srun: error: n1: tasks 0-3: Terminated\n", ranks(silent=(2, 3)))
    assert (failure.kind, failure.reason, failure.excluded_nodes) == ("killed", verdict.reason, ())
    assert diagnose(finished_run_verdict(None, [], ""), job("FAILED")).kind == "killed"
    assert finished_run_verdict(0, [end], "") == ("incomplete", end.reason, None)  # the engine was told to stop


def test_oom_kill_of_a_step():
    """Slurm itself reports FAILED 1:0 for the job."""
    lost = failed("rank 3: disappeared without an exit status; rank 0: RuntimeError: Connection closed by peer", 3)
    failure = diagnose(lost, job("FAILED"), STEP_OOM, ranks(silent=(3,)))
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("oom_kill", False, ())
    assert "on n2: slurmstepd-n2: error: Detected 1 oom-kill" in failure.reason


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: StepId=12.0 exceeded memory limit (131072 > 102400), being killed",
        "srun: error: nid001277: tasks 1-3: Out Of Memory",
        "kernel: Out of memory: Killed process 4242 (python3) total-vm:9000000kB",
    ],
)
def test_oom_kill_messages(line):
    assert diagnose(failed("exit code 137"), None, f"step 1\n{line}\n").kind == "oom_kill"


def test_rank_killed_for_an_unknown_reason():
    failure = diagnose(failed("exit code 137: srun: Force Terminated"), job("FAILED"), KILLED, ranks(silent=(3,)))
    assert (failure.kind, failure.retryable) == ("killed", False)
    assert "on n2: srun: error: n2: task 3: Killed" in failure.reason
    assert diagnose(failed("rank 1: killed by signal 9 (SIGKILL)", 1), None).kind == "killed"
    assert diagnose(None, job("FAILED", reason="JobLaunchFailure", exit_code=0, signal=9)).kind == "killed"
    assert diagnose(None, None).kind == "killed"


def test_killed_task_on_a_live_node_is_not_a_node_failure():
    """Its only rank is silent, but srun got its exit status from the node."""
    failure = diagnose(failed("exit code 137"), job("FAILED"), KILLED, ranks(silent=(1,), hosts=("n1", "n2")))
    assert failure.kind == "killed"


def test_silent_node():
    lost = failed("rank 2: disappeared without an exit status; rank 0: RuntimeError: Connection reset by peer", 2)
    failure = diagnose(lost, job("FAILED"), "[rank0]: Connection reset by peer\n", ranks(silent=(2, 3)))
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("node_failure", True, ("n2",))
    assert failure.reason.startswith("node n2 went silent: ranks 2-3 disappeared without an exit status")


@pytest.mark.parametrize(
    "line",
    [
        "[rank2]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "[rank2]: RuntimeError: CUDA error: an illegal memory access was encountered",
        "n2:531:1762 [0] enqueue.cc:1 NCCL WARN Cuda failure 719 'uncorrectable NVLink error detected'",
        "Nov 15 12:00:00 n2 kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid=1234, GPU has fallen off the bus.",
    ],
)
def test_gpu_fault_excludes_its_node(line):
    noise = "[rank0]: ncclRemoteError: A call failed possibly due to a network error\n"
    failure = diagnose(failed("rank 0: DistBackendError: NCCL error in: x", 0), job("FAILED"), noise + line, ranks())
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("gpu_fault", True, ("n2",))


def test_lost_connection_is_retried_if_a_node_is_excluded():
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:46286"
    no_culprit = diagnose(failed(f"rank 0: {lost}"), job("FAILED"), "", ranks())
    assert (no_culprit.kind, no_culprit.retryable) == ("network", False)
    one_culprit = diagnose(
        failed(f"rank 3: disappeared without an exit status; rank 0: {lost}", 3), job("FAILED"), "", ranks(silent=(3,))
    )
    assert (one_culprit.kind, one_culprit.retryable, one_culprit.excluded_nodes) == ("network", True, ("n2",))
    nccl = (
        "n1:27255:27934 [0] ib_plugin.c:1105 NCCL WARN NET/IB : Got completion from peer 10.0.35.1<49189> with error 4"
    )
    assert diagnose(failed("exit code 1"), job("FAILED"), nccl, ranks()).kind == "nccl_error"
    assert (
        diagnose(failed("rank 0: torch.distributed.DistNetworkError: The client socket has timed out", 0)).kind
        == "network"
    )


def test_node_of_a_rank_from_srun():
    """Hostnames may differ from Slurm's node names; with our engine a task is a rank."""
    hung = failed("hung: rank 3 did not respond", 3)
    unknown = ranks(hosts=("localhost",) * 4)
    assert diagnose(hung, job("FAILED"), KILLED, unknown).excluded_nodes == ("n2",)
    assert diagnose(hung, job("FAILED"), KILLED, []).excluded_nodes == ()


def test_hang():
    hung = (
        "hung: no rank made progress for 30 s after step 4; rank 2 did not respond: stopped, or busy inside a library"
    )
    failure = diagnose(failed(hung, 2), job("FAILED"), "", ranks())
    assert failure == Failure("hung", hung, True, ("n2",))
    assert not diagnose(
        failed("hung: all ranks have entered the same collectives"), job("FAILED"), "", ranks()
    ).retryable


PYXIS = """\
pyxis: importing docker image: example.com/nemo:25.07
slurmstepd: error: pyxis: child 10028 failed with error code: 1
slurmstepd: error: pyxis: failed to import docker image
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [INFO] Querying registry for permission grant
slurmstepd: error: pyxis:     {}
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
srun: error: n2: task 0: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("line", "retryable"),
    [
        ("[ERROR] URL https://example.com/v2/nemo/manifests/25.07 returned error code: 401 Unauthorized", False),
        ("[ERROR] URL https://example.com/v2/nemo/manifests/25.07 returned error code: 404 Not Found", False),
        ("[ERROR] URL https://example.com/v2/nemo/manifests/25.07 returned error code: 429 Too Many Requests", True),
        ("curl: (6) Could not resolve host: example.com", True),
        ("[ERROR] No such file or directory: /images/nemo.sqsh", False),
    ],
)
def test_missing_container(line, retryable):
    failure = diagnose(failed("exit code 1"), job("FAILED"), PYXIS.format(line))
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("container_missing", retryable, ())
    assert failure.reason.endswith(line)


def test_cluster_without_pyxis():
    log = "srun: unrecognized option '--container-image=x'\nTry \"srun --help\" for more information\n"
    assert diagnose(failed("exit code 1"), job("FAILED"), log).kind == "container_missing"


def test_full_disk_under_a_run_or_its_container():
    full = "rank 0: OSError: [Errno 28] No space left on device: 'checkpoint'"
    assert diagnose(failed(full, 0), job("FAILED")).kind == "disk_full"
    image = PYXIS.format("Write failed because No space left on device")
    assert diagnose(failed("exit code 1"), job("FAILED"), image).kind == "disk_full"


def test_missing_weights():
    reason = "/weights/deepseek is not a folder of weights"
    assert diagnose(failed(reason), None, f"llmb.serve: {reason}\n").kind == "weights_missing"
    external = "OSError: x/y is not a local folder and is not a valid model identifier listed on a hub\n"
    assert diagnose(failed("exit code 1"), None, external).kind == "weights_missing"


def test_out_of_device_memory():
    reason = "rank 1: out of memory at a peak of 79 GiB; set recompute_layers"
    failure = diagnose(failed(reason, 1, status="oom"), job("FAILED"), "ncclRemoteError\n", ranks())
    assert failure == Failure("gpu_oom", reason, False, ())
    external = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\nncclRemoteError: x\n"
    assert diagnose(failed("exit code 1"), None, external).kind == "gpu_oom"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error", "gpu_fault"),
        ("RuntimeError: CUDA error: unspecified launch failure", "gpu_fault"),
        ("OSError: [Errno 122] Disk quota exceeded: 'x'", "disk_full"),
        ("[ERROR] No such file or directory: /images/nemo.sqsh", "container_missing"),
        ("slurmstepd: error: pyxis: couldn't start container", "container_missing"),
        ("/bin/bash: line 1: enroot: command not found", "container_missing"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "weights_missing"),
        ("OSError: Can't load tokenizer for 'x/y'.", "weights_missing"),
        ("OSError: x/y does not appear to have a file named config.json.", "weights_missing"),
        ("RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB", "gpu_oom"),
        ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", "nccl_timeout"),
        ("torch.distributed.DistBackendError: NCCL error in: x.hpp:317, unhandled system error", "nccl_error"),
        ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed", "nccl_error"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "network"),
        ("RuntimeError: [../gloo/pair.cc:144] no error: No route to host", "network"),
        ("srun: error: n2: tasks 0,2-3: Killed", "killed"),
    ],
)
def test_kind_of_log_lines(line, kind):
    failure = diagnose(failed("exit code 1"), job("FAILED"), f"step 1\n{line}\nTerminating\n")
    assert failure.kind == kind
    assert failure.reason.endswith(f": {line}")


def test_program_error_outweighs_errors_of_its_peers():
    noise = "[rank0]: ncclRemoteError\n[rank0]: Connection reset by peer\n[rank1]: Watchdog caught collective\n"
    failure = diagnose(failed("rank 2: ValueError: no such layer", 2), job("FAILED"), noise, ranks())
    assert failure == Failure("program_error", "rank 2: ValueError: no such layer", False, ())
    assert diagnose(failed("loss became nan at step 3", status="diverged"), None, noise).kind == "program_error"


def test_request_refused_by_the_engine():
    reason = "the configuration needs 4 ranks but 2 started"
    assert diagnose(failed(reason), job("FAILED"), f"[rank1]: llmb.train: {reason}\n").kind == "refused"
    step = "srun: error: Unable to create step for job 1: More processors requested than permitted\n"
    assert diagnose(failed("exit code 1"), job("FAILED"), step).kind == "refused"


def test_exit_status_without_symptoms():
    crashed = "srun: error: n2: task 1: Segmentation fault\nsrun: error: n1: task 0: Terminated\n"
    assert diagnose(None, job("FAILED"), crashed).reason == "task 1 on n2: Segmentation fault"
    assert diagnose(None, job("FAILED")).reason == "the job ended (FAILED, exit code 1), but the run recorded no end"
    assert diagnose(None, job("COMPLETED", exit_code=0)).kind == "program_error"
    assert diagnose(Verdict("failed", "exit code 3: bye")) == Failure("program_error", "exit code 3: bye")


def test_reason_is_one_line_of_bounded_length():
    assert "\n" not in diagnose(failed("ValueError: a\n b")).reason
    assert len(diagnose(failed("ValueError: " + "x" * 9999)).reason) == 400


LINES = st.sampled_from([*STEP_OOM.split("\n"), *NODE_LOST.split("\n"), *KILLED.split("\n")])


@pytest.mark.slow
@given(st.lists(LINES | st.text()), st.text() | st.none(), st.sampled_from(["FAILED", "NODE_FAIL", "", "x"]))
def test_any_log_has_a_diagnosis(lines, reason, state):
    failure = diagnose(failed(reason), job(state), "\n".join(lines), ranks(silent=(3,)))
    assert failure.kind in typing.get_args(FailureKind)
    assert "\n" not in failure.reason
    assert failure.reason


def test_host_unknown_to_slurm_is_not_excluded():
    """sbatch would refuse its name."""
    hung = failed("hung: rank 1 did not respond", 1)
    assert diagnose(hung, job("FAILED"), "", ranks(hosts=("n1.example.com", "n2.example.com"))).excluded_nodes == (
        "n2",
    )
    assert diagnose(hung, job("FAILED"), "", ranks(hosts=("localhost", "localhost"))).excluded_nodes == ()


def test_diagnose_run(tmp_path, config):
    run_folder = RunFolder.create(tmp_path, config, datetime(2026, 1, 2, 3, 4, 5))
    for event in ranks(silent=(2, 3)):
        append(run_folder.events(event.rank), event)
    (run_folder.path / "slurm-7.out").write_text(NODE_LOST)
    failure = diagnose_run(run_folder, job("NODE_FAIL"))
    assert (failure.kind, failure.excluded_nodes) == ("node_failure", ("n2",))
    append(run_folder.events(0), RunEnded(status="ok"))
    assert diagnose_run(run_folder, dataclasses.replace(job("COMPLETED"), exit_code=0)) is None
