"""Parallel serving has the outputs of a single process, token for token, in any layout; and a failing rank does not
leave the others hanging.

The layouts are those of the recipes (TP8 EP8 PP2, TP4 EP4 with attention data parallelism) and simpler ones, which are
easier to debug. Prefills are chunked, and the cache is so small that sequences are preempted.
"""

import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from dense_cases import DENSE_CASES
from forked_ranks import on_ranks
from serving_ranks import ServedOutcome, rank_outcome, served_by_ranks
from small_models import GROUPED_MOE, glm4_moe_model
from small_served import DEEPSEEK, GROK, LLAMA, MIXTURES, NEMOTRON, config_of, write_weights
from small_serving import write_config

from llmb.config.model import Model
from llmb.config.native.serving_support import check_serving_layout
from llmb.config.serialization import build, read_json
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.events import RequestDone, RunEnded, RunStarted, read, read_all
from llmb.launch.run_folder import RunFolder
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights
from llmb.results.derive import derive
from llmb.results.serving_figures import engine_facts
from llmb.runtime.recorder import EventRecorder
from llmb.serve.__main__ import run
from llmb.serve.engine import Engine
from llmb.serve.group_collectives import DataParallelExperts, min_over_ranks
from llmb.serve.layers.served_model import ServedModel
from llmb.serve.model_runner import LaunchedStep
from llmb.serve.pipeline_runner import PipelineStageRunner
from llmb.serve.request import Request, SamplingParams
from llmb.serve.step_batch import StepBatch

GPT_OSS = MIXTURES[-1]
GEMMA3, GRANITE = (next(model for model in DENSE_CASES if model.architecture == name) for name in ("gemma3", "granite"))
WIDE: dict[str, Any] = {"heads": 16, "vocab": 128, "layers": 4}
MODELS = {
    "llama": replace(LLAMA, **WIDE),  # 2 KV heads: fewer than ranks
    "deepseek": replace(DEEPSEEK, **WIDE, kv_heads=16, experts=replace(DEEPSEEK.experts, count=16, ffn=32)),
    "grok1": replace(GROK, **WIDE, experts=replace(GROK.experts, count=16)),
    "nemotron_h": replace(NEMOTRON, **WIDE | {"layers": 6}, mamba=replace(NEMOTRON.mamba, groups=4)),
    # Sinks, biases of projections and of experts; norms of heads and a window in every other layer.
    "gpt_oss": replace(GPT_OSS, **WIDE, experts=replace(GPT_OSS.experts, count=16)),
    "gemma3": replace(GEMMA3, **WIDE),
    "granite": replace(GRANITE, **WIDE),
    # Biases, norms of partly rotated heads, a dense layer and a shared expert.
    "glm4_moe": glm4_moe_model(name="glm4_moe", head_dim=16, experts=replace(GROUPED_MOE, count=16, ffn=32), **WIDE),
}
MARGIN = 1e-4  # of the most likely token, in logits: about a hundred times the rounding error
SETTINGS: dict[str, Any] = {"max_num_tokens": 16, "max_batch_size": 6, "block_tokens": 4}
BLOCKS = 12  # of 4 tokens: one sequence of the longest

PP4, TP2, TP4, PP2, TP2_PP2 = {"pp": 4}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}
TP4_EP2, TP4_EP4 = {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}
TP4_EP4_DP = {**TP4_EP4, "attention_dp": True}
TP2_PP2_DP = {**TP2_PP2, "attention_dp": True}
TP8_EP8_PP2 = {"tp": 8, "ep": 8, "pp": 2}
TP8_EP8_PP2_DP = {**TP8_EP8_PP2, "attention_dp": True}
LAYOUTS = [
    *((name, layout) for name in MODELS for layout in (TP2, TP4, PP2, TP2_PP2, TP2_PP2_DP)),
    *(
        (name, layout)
        for name in ("deepseek", "grok1", "gpt_oss", "glm4_moe")
        for layout in (TP4_EP2, TP4_EP4, TP4_EP4_DP)
    ),
    *(("deepseek", layout) for layout in (TP8_EP8_PP2, TP8_EP8_PP2_DP)),
    ("llama", PP4),
]
QUICK = [("llama", TP2), ("nemotron_h", PP2), ("grok1", TP2_PP2), ("deepseek", TP4_EP4_DP), ("gpt_oss", TP4_EP2)]


def marks(case: tuple[str, dict[str, Any]]) -> list[pytest.MarkDecorator]:
    return [] if case in QUICK else [pytest.mark.nightly]


def layout_id(layout: dict[str, Any]) -> str:
    return " ".join(name if value is True else f"{name}{value}" for name, value in layout.items())


@dataclass(frozen=True)
class Case:
    """A model in a folder, requests, and their outputs by a single process."""

    model: Model
    folder: Path
    requests: list[Request]
    outcome: ServedOutcome

    def served(self, layout: dict[str, Any], blocks: int = BLOCKS, **more: Any) -> ServedOutcome:
        config = config_of(self.model, self.folder, **SETTINGS | layout)
        return served_by_ranks(config, self.requests, blocks, **more)


def some_requests(vocab: int) -> list[Request]:
    """Return requests of random lengths that might stop early, so that the engine admits more than will fit."""
    draw, stop = random.Random(31), ((vocab,),)
    lengths = [(draw.choice((1, 3, 6, 9, 26)), draw.randint(10, 18)) for _ in range(8)]
    return [
        Request(request_id=number, prompt=[draw.randrange(vocab) for _ in range(count)], max_tokens=output, stop=stop)
        for number, (count, output) in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    """Write a model and serve its requests in a single process, once."""

    @cache
    def case(name: str) -> Case:
        model = MODELS[name]
        folder, requests = write_weights(model, tmp_path_factory.mktemp(name)), some_requests(model.vocab)
        outcome = rank_outcome(0, config_of(model, folder, **SETTINGS), requests, BLOCKS, None)
        return Case(model, folder, requests, outcome)

    return case


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad
def test_single_process_equals_network_by_a_margin(case_of, name: str) -> None:
    case = case_of(name)
    network = build_model(case.model)
    load_weights(network, case.folder)
    margins = []
    for request in case.requests:
        output = case.outcome.outputs[request.request_id]
        logits_TV = network(torch.tensor([[*request.prompt, *output]]))[0, len(request.prompt) - 1 : -1]
        best_T2 = logits_TV.topk(2, dim=-1)
        assert best_T2.indices[:, 0].tolist() == list(output)
        margins.append((best_T2.values[:, 0] - best_T2.values[:, 1]).min().item())
    assert min(margins) > MARGIN
    assert case.outcome.preempted[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, id=f"{case[0]} {layout_id(case[1])}", marks=marks(case)) for case in LAYOUTS],
)
def test_parallel_outputs_equal_single_process(case_of, name: str, layout: dict[str, Any]) -> None:
    case = case_of(name)
    actual = case.served(layout)
    assert actual.outputs == case.outcome.outputs
    schedulers = layout["tp"] if layout.get("attention_dp") else 1
    assert (sum(actual.preempted) > 0) == (schedulers < len(case.requests))  # a single request has the whole cache


@pytest.mark.slow
def test_sampled_outputs_equal_single_process(case_of) -> None:
    case = case_of("llama")
    sampled = [
        replace(request, sampling_params=SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=request.request_id))
        for request in case.requests
    ]
    single_process = rank_outcome(0, config_of(case.model, case.folder, **SETTINGS), sampled, BLOCKS, None)
    assert single_process.outputs != case.outcome.outputs
    assert replace(case, requests=sampled).served(TP2_PP2).outputs == single_process.outputs


@pytest.mark.slow
def test_prefix_cache_on_every_rank(case_of) -> None:
    case, begin = case_of("llama"), list(range(20, 33))
    requests = [Request(request_id=number, prompt=[*begin, number], max_tokens=6) for number in range(6)]
    single_process = rank_outcome(0, config_of(case.model, case.folder, **SETTINGS), requests, 64, None)
    for layout in (TP2, PP2):
        actual = replace(case, requests=requests).served(
            {**layout, "prefix_cache": True, "max_batch_size": 2}, blocks=64
        )
        assert actual.outputs == single_process.outputs
        assert actual.computed == [single_process.computed[0] - 4 * 12] * 2  # later requests hit 3 blocks of 4 tokens


# -- pipeline parallelism


class Launches:
    """Steps launched by one rank, counted by another through a pipe."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._heard = 0

    def say(self) -> None:
        os.write(self._writer, b".")

    def wait_for(self, count: int) -> None:
        while self._heard < count:
            readable, _, _ = select.select([self._reader], [], [], 30)
            assert readable, f"the first stage waits for tokens: it has launched {self._heard} steps, not {count}"
            self._heard += len(os.read(self._reader, 1))


@pytest.mark.slow
def test_first_stage_launches_ahead_of_the_last(case_of) -> None:
    """The last stage holds back the tokens of a step until the first has launched the next one."""
    case = case_of("llama")
    requests = [Request(request_id=number, prompt=[number, 7, 9], max_tokens=12) for number in range(4)]
    launches = Launches()

    def hold_back(engine: Engine) -> None:
        runner = engine.runner
        assert isinstance(runner, PipelineStageRunner)
        steps, launch, tell = itertools.count(), runner.launch, runner._broadcast_tokens

        def launch_and_say(batch: StepBatch) -> LaunchedStep:
            step = launch(batch)
            launches.say()
            return step

        def wait_and_tell(*output: Any) -> LaunchedStep:
            if 1 <= (step := next(steps)) <= 8:  # the first step has all prefills, later ones fewer requests
                launches.wait_for(step + 2)
            return tell(*output)

        if runner.stage.is_first:
            runner.launch = launch_and_say  # type: ignore[method-assign]
        else:
            runner._broadcast_tokens = wait_and_tell  # type: ignore[method-assign]

    single_process = rank_outcome(0, config_of(case.model, case.folder, **SETTINGS), requests, 64, None)
    assert replace(case, requests=requests).served(PP2, blocks=64, change=hold_back).outputs == single_process.outputs


# -- attention data parallelism


def exchanged(rank: int, counts: list[int]) -> tuple[bool, torch.Tensor, torch.Tensor, bool, int]:
    """Return what a rank dispatches and combines when each rank's experts multiply by 10 ** rank."""
    dist.init_process_group("gloo")
    group = DataParallelExperts(process_group=dist.group.WORLD, control=dist.group.WORLD)
    any_tokens = group.begin_step(counts[rank])
    own_NC = torch.full((max(1, counts[rank]), 2), rank + 1.0)
    seen_NC = group.dispatch(own_NC)
    back_NC = group.combine(seen_NC * 10**rank)
    return any_tokens, seen_NC, back_NC, group.any_busy(rank == 1), min_over_ranks(5 + rank, torch.device("cpu"))


@pytest.mark.parametrize("counts", [[2, 0, 3], [1, 1, 1], [0, 4, 0]])
def test_dispatch_and_combine_of_data_parallel_experts(counts: list[int]) -> None:
    all_tokens = [[rank + 1.0] * 2 for rank, count in enumerate(counts) for _ in range(count)]
    for rank, (any_tokens, seen_NC, back_NC, any_busy, least) in enumerate(on_ranks(3, exchanged, counts)):
        assert (any_tokens, any_busy, least) == (True, True, 5)
        assert seen_NC.tolist() == all_tokens
        assert back_NC.tolist() == ([[111.0 * (rank + 1)] * 2] * counts[rank] or [[0.0, 0.0]])  # padding gets zero


# -- the benchmark


@pytest.mark.slow
def test_results_add_up_the_requests_of_all_ranks(tmp_path: Path) -> None:
    model = replace(MODELS["deepseek"], layers=2)
    path = write_config(tmp_path / "run", model=model, gpus=4, **TP4_EP4_DP, num_requests=10, concurrency=6)
    assert on_ranks(4, run_rank, path) == [0] * 4
    config = build(RunConfig, read_json(path), "config.json")
    events = list(read_all(sorted(path.parent.glob("events.*"))))
    rank_requests = [
        [e.request for e in events if isinstance(e, RequestDone) and e.rank == r and not e.warmup] for r in range(4)
    ]
    assert [sorted(numbers) for numbers in rank_requests] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    result = derive(config, events)
    assert (result.status, result.requests, result.output_tokens, result.lengths_wrong) == ("ok", 10, 60, 0)
    facts = engine_facts(events)
    assert len({facts[rank].kv_blocks for rank in range(4)}) == 1
    assert facts[0].graph_batches == ()


def run_rank(rank: int, path: Path) -> int:
    os.chdir(path.parent)
    return run(path, EventRecorder(path.parent, rank))


@pytest.mark.slow
def test_failing_rank_ends_the_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(forked_ranks, "LINGER_S", 0.1)  # failed ranks exit soon
    path = write_config(tmp_path / "run", vocab=96, gpus=4, **TP2_PP2, num_requests=1000)
    assert on_ranks(4, run_rank_that_may_fail, path) == [2] * 4
    ends = [[e for e in read(path.parent / f"events.rank{rank}.jsonl") if isinstance(e, RunEnded)] for rank in range(4)]
    assert [(end.status, end.failed_rank) for (end,) in ends] == [("failed", rank) for rank in range(4)]
    reasons = [end.reason for (end,) in ends]
    assert reasons[1] == "ZeroDivisionError: division by zero"
    assert all("Connection closed by peer" in reasons[rank] or "gloo" in reasons[rank] for rank in (0, 2, 3))


@pytest.mark.nightly  # a training rank is killed by test_faults.py, and a serving rank fails in the test above
def test_killed_rank_is_reported_to_the_user() -> None:
    override = "submit -w inference_deepseek-r1 -s 671b --dtype fp8 --scale 2 --proxy --json --set num_requests=5000"
    command = [sys.executable, "-m", "llmb.cli.llmb_run", *override.split()]
    submit = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_folder = wait_for(lambda: next(RunFolder.find_all(Path(os.environ["LLMB_INSTALL"])), None))
    wait_for(lambda: any(isinstance(event, RequestDone) for event in read(run_folder.events(0))))
    (pid,) = [event.pid for event in read(run_folder.events(1)) if isinstance(event, RunStarted)]
    os.kill(pid, signal.SIGKILL)
    out, _ = submit.communicate(timeout=60)
    result = json.loads(out.splitlines()[-1])
    assert submit.returncode == 2
    assert (result["status"], result["failed_rank"]) == ("failed", 1)
    assert result["reason"] == "rank 1: killed by signal 9 (SIGKILL)"


def wait_for(actual: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := actual()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def run_rank_that_may_fail(rank: int, path: Path) -> int:
    """Rank 1 fails in its twentieth step, and ends as its process would."""
    steps, forward = itertools.count(), ServedModel.forward

    def fail_once(served_model: ServedModel, *arguments: Any) -> torch.Tensor:
        if rank == 1 and next(steps) == 20:
            1 / 0  # noqa: B018
        return forward(served_model, *arguments)

    with mock.patch.object(ServedModel, "forward", fail_once):
        return run_rank(rank, path)


# -- refusals


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"tp": 32}, "tp 32 does not divide the 16 heads of llama; tp could be 1, 2, 4, 8, 16"),
        ("llama", {"tp": 3}, "tp 3 does not divide the 128 entries of the vocabulary of llama"),
        ("llama", {"tp": 2, "ep": 2}, "ep 2 and etp 1 have no effect: llama has no experts"),
        ("llama", {"pp": 5}, "pp 5 needs more layers than the 4 of llama"),
        ("llama", {"dp": 2}, "tp 1 x pp 1 = 1 ranks serve, 2 GPUs are requested"),
        ("llama", {"cp": 2}, "cp=2: the serving engine splits by tp, pp and ep only"),
        ("nemotron_h", {"tp": 8}, "tp 8 does not divide the 4 Mamba groups of nemotron_h"),
        ("deepseek", {"tp": 4, "ep": 3}, "ep 3 x etp 1 does not divide the 4 ranks of a pipeline stage"),
        ("deepseek", {"tp": 32, "ep": 32, "attention_dp": True}, "ep 32 does not divide 16 experts"),
        ("deepseek", {"tp": 64, "attention_dp": True}, "tp 64 / ep 1 = 64 ranks share each expert"),
    ],
)
def test_indivisible_layout_is_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_serving_layout(config_of(MODELS[name], None, **changes))
