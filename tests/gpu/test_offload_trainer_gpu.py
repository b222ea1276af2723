"""Out-of-core training on a GPU: CUDA streams, pinned memory, kernels; the same training as in memory."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, no_synchronization
from recipe_models import recipe_model
from reference_training import LEAST, SEED, SMOOTH, UNTIED, lr, train_reference, trained, trainer_of, weights_in

from llmb.config.offload_plan import UPDATES, Plan
from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, OutOfCore, Parallel, Precision, Profile, RunConfig
from llmb.events import RunEnded, StepDone, read
from llmb.models.llama import Llama
from llmb.offload.__main__ import run
from llmb.offload.cuda_streams import EVENTS, CudaStreams
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.plan_candidate import PlanConstraints
from llmb.perfmodel.offload.plan_search import best_plan
from llmb.perfmodel.offload.stream_timeline import read_timeline
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.synthetic_tokens import synthetic_tokens

pytestmark = NEEDS_GPU

ONE_B = recipe_model("outofcore_llama3", "1b")
PLANS = {
    "everything moves": replace(LEAST, chunk_tokens=4, levels="FAIAIFIFA"),
    "several groups per round": replace(LEAST, update_at="forward", gbs=5, groups_per_round=2, levels="FAIIAF"),
    "several sequences per chunk": replace(LEAST, gbs=5, seqs_per_group=2, chunk_tokens=20, levels="FAI"),
}


@pytest.fixture(autouse=True)
def unlimited_allocator() -> Iterator[None]:
    """A run limits torch's allocator to its budget; lift the limit for the next test."""
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def smooth_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger epsilon of Adam, so that weights can be compared as closely as gradients."""
    monkeypatch.setattr("llmb.offload.task_compute.EPS", SMOOTH)


@pytest.mark.usefixtures("smooth_updates")
@pytest.mark.parametrize("plan", PLANS)
def test_small_models_train_as_on_cpu(plan: str) -> None:
    losses, norms, network = train_reference(UNTIED, PLANS[plan], 4, None)
    trainer = trainer_of(UNTIED, PLANS[plan], device=GPU)
    actual_losses, actual_norms = trained(trainer, 4)
    assert actual_losses == pytest.approx(losses, rel=1e-5)
    assert actual_norms == pytest.approx(norms, rel=1e-4)
    weights = weights_in(trainer)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def plan_of_1b(update: str, dtype: str) -> Plan:
    """Two groups of three chunks, the last one short; half of everything is offloaded, at all save levels."""
    shards = ParamBuckets(ONE_B).vocab_shards
    return Plan(
        dtype=dtype, seqlen=1280, gbs=2, chunk_tokens=512, seqs_per_group=1, groups_per_round=2, loss_tokens=256,
        update=update, update_at="forward", resident_params=8, resident_grads=4, resident_states=4,
        param_blocks=shards + 1, grad_blocks=shards + 1, state_blocks=2, inp_slots=8, kv_slots=4, attn_slots=6,
        rest_slots=4, levels="FAI" * 32,
    )  # fmt: skip


@pytest.mark.usefixtures("smooth_updates")
def test_1b_trains_as_under_autograd() -> None:
    """Compare losses, norms and all weights in fp32, from the initial weights of a run."""
    plan = plan_of_1b("master", "fp32")
    trainer = trainer_of(ONE_B, plan, clip=1.0, device=GPU, initial=True)
    trainer.streams.wait()
    network = Llama(ONE_B).to(GPU)
    with torch.no_grad():
        for name, weight in weights_in(trainer).items():
            network.get_parameter(name).copy_(weight)
    matrices, vectors = ([p for p in network.parameters() if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=SMOOTH, fused=True)
    actual_losses, actual_norms = trained(trainer, 2)
    for step in (1, 2):
        tokens = synthetic_tokens(SEED, (step - 1) * 2, (2, 1281), ONE_B.vocab, GPU)
        loss = network(tokens[:, :-1], tokens[:, 1:])
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = lr(step)
        adamw.step()
        assert actual_losses[step - 1] == pytest.approx(loss.item(), rel=2e-5)
        assert actual_norms[step - 1] == pytest.approx(norm.item(), rel=2e-4)
    for name, weight in weights_in(trainer).items():
        difference = (weight - network.get_parameter(name).detach().cpu()).abs()
        assert difference.max() < 1e-4, name
        assert difference.mean() < 1e-6, name


@cache
def losses_of_1b(update: str, dtype: str) -> list[float]:
    torch.cuda.empty_cache()
    plan = plan_of_1b(update, dtype)
    return trained(trainer_of(ONE_B, plan, clip=1.0, device=GPU, initial=True, rate=lambda _: 1e-4), 3)[0]


@pytest.mark.parametrize("update", UPDATES)
def test_bf16_of_1b_follows_fp32(update: str) -> None:
    """At a learning rate at which this model is stable: rounding must not be amplified."""
    assert losses_of_1b(update, "bf16") == pytest.approx(losses_of_1b("master", "fp32"), rel=0.02)


def test_steps_never_synchronize() -> None:
    trainer = trainer_of(ONE_B, plan_of_1b("stochastic", "bf16"), device=GPU, initial=True)
    trainer.step(1)  # compiles kernels and allocates pinned memory
    trainer.streams.wait()
    with no_synchronization():
        issued = [trainer.step(step) for step in (2, 3)]
    trainer.streams.wait()
    assert all(torch.isfinite(output.stats).all() for output in issued)


def test_streams_keep_their_order_over_more_entries_than_events() -> None:
    """Each stream increments a counter in turn: wrong as soon as one does not wait."""
    streams, counter = CudaStreams(GPU), torch.zeros((), dtype=torch.int64, device=GPU)
    seen = torch.empty(EVENTS + 50, 3, dtype=torch.int64, device=GPU)
    streams.begin()
    for number in range(len(seen)):
        streams.enter("inbound", lambda: counter.add_(1), {"outbound": number - 1})
        streams.enter("compute", lambda n=number: (seen[n, 0].copy_(counter), counter.add_(1)), {"inbound": number})
        streams.enter("outbound", lambda n=number: (seen[n, 1].copy_(counter), counter.add_(1)), {"compute": number})
    streams.wait()
    rounds = torch.arange(len(seen), device=GPU) * 3
    assert torch.equal(seen[:, 0], rounds + 1)
    assert torch.equal(seen[:, 1], rounds + 2)


def test_host_slab_is_pinned() -> None:
    slab = HostSlab(1 << 28, GPU)
    assert slab.memory.is_pinned()
    assert slab.memory[12345].is_pinned()


@pytest.mark.exclusive  # the host and device budgets, and overlap in time
def test_run_keeps_its_budgets_and_overlaps_its_streams(tmp_path: Path) -> None:
    constraints = PlanConstraints(dtype="bf16", seqlen=8192, host_gib=16, device_gib=10, update="stochastic", gbs=8)
    result = best_plan(ONE_B, constraints, H200)
    config = RunConfig(
        name="1b", target="outofcore_llama3", size="1b", machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
        model=ONE_B, parallel=Parallel(), precision=Precision(dtype="bf16"),
        workload=OutOfCore(
            seqlen=8192, host_gib=16, device_gib=10, gbs=8, steps=4, window=(3, 4), plan=result.plan, lr=1e-5
        ),
        profile=Profile(profile=True, profile_start=3, profile_stop=4),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
    assert run(tmp_path / "config.json", EventRecorder(tmp_path, 0)) == 0
    events = list(read(tmp_path / "events.rank0.jsonl"))
    steps = [event for event in events if isinstance(event, StepDone)]
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "ok"
    assert len(steps) == 4
    assert all(event.memory_bytes <= 10 * GIB for event in steps)
    assert steps[-1].loss < steps[0].loss
    streams = read_timeline(tmp_path / "profile" / "lanes.json")
    busy = {
        stream: sum(event.end - event.start for event in streams.events if event.stream == stream)
        for stream in ("compute", "inbound")
    }
    wall = max(s.end for s in streams.events) - min(s.start for s in streams.events)
    assert wall < busy["compute"] + busy["inbound"]
