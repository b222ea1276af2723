"""Out-of-core training of Qwen3, mixtures and others on a GPU: as in memory, in its budget, without synchronization."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, no_synchronization
from dense_cases import DENSE_CASES
from mixture_cases import MIXTURE_CASES
from reference_training import LEAST, SMOOTH, train_reference, trained, trainer_of, weights_in

from llmb.config.llama_layer_shapes import has_llama_layers, has_plain_layers
from llmb.config.offload_plan import Plan
from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, Model, MoEConfig, OutOfCore, Parallel, Precision, RunConfig
from llmb.events import RunEnded, StepDone, read
from llmb.models.architectures import build_model
from llmb.offload.__main__ import run
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.plan_candidate import PlanConstraints
from llmb.perfmodel.offload.plan_search import best_plan
from llmb.runtime.recorder import EventRecorder
from llmb.runtime.synthetic_tokens import synthetic_tokens

pytestmark = NEEDS_GPU

CASES = [model for model in (*DENSE_CASES, *MIXTURE_CASES) if not has_plain_layers(model)]
# Of the width of Qwen3-1.7B, with fewer layers.
QWEN3 = Model(
    name="qwen3", architecture="qwen3", layers=8, hidden=2048, ffn=6144, heads=16, kv_heads=8, head_dim=128,
    vocab=151936, qk_norm="head", tied_embeddings=True, norm_eps=1e-6,
)  # fmt: skip
MIXTURE = replace(
    QWEN3, name="mixture", architecture="qwen3_moe", layers=4, tied_embeddings=False, vocab=32000,
    experts=MoEConfig(count=32, top_k=4, ffn=768),
)  # fmt: skip
# Of the width of Gemma 2 2B, with fewer layers and a window shorter than the sequences here.
GEMMA2 = Model(
    name="gemma2", architecture="gemma2", layers=4, hidden=2304, ffn=9216, heads=8, kv_heads=4, head_dim=256,
    vocab=32000, activation="gelu", post_norms=True, tied_embeddings=True, norm_eps=1e-6, embedding_scale=48.0,
    attn_logit_softcap=50.0, logit_softcap=30.0, attention_pattern="SF", window=700,
)  # fmt: skip


@pytest.fixture(autouse=True)
def unlimited_allocator() -> Iterator[None]:
    """A run limits torch's allocator to its budget; lift the limit for the next test."""
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def streaming_plan(model: Model, **changes: object) -> Plan:
    """Return two groups of three chunks, the last one short; half of everything is offloaded."""
    shards = ParamBuckets(model).vocab_shards
    plan = Plan(
        dtype="bf16", seqlen=1280, gbs=2, chunk_tokens=512, seqs_per_group=1, groups_per_round=2, loss_tokens=256,
        update="stochastic", update_at="forward", resident_params=2, resident_grads=1, resident_states=1,
        param_blocks=shards + 1, grad_blocks=shards + 1, state_blocks=2, inp_slots=8, kv_slots=4, attn_slots=6,
        rest_slots=0, levels="AIA" * 2 * model.layers,
    )  # fmt: skip
    if has_llama_layers(model):
        plan = replace(plan, rest_slots=4, levels="FAI" * 2 * model.layers)
    return replace(plan, **changes)


@pytest.mark.parametrize("model", CASES, ids=lambda model: f"{model.architecture}-{model.name}")
def test_small_models_train_as_on_cpu(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmb.offload.task_compute.EPS", SMOOTH)
    shards = ParamBuckets(model).vocab_shards
    plan = replace(LEAST, gbs=3, chunk_tokens=4, groups_per_round=2, param_blocks=shards, grad_blocks=shards)
    letters = "FAIIFA" if has_llama_layers(model) else "AIIAA"
    plan = replace(plan, levels=(letters * model.layers * 2)[: model.layers * 6])
    losses, norms, network = train_reference(model, plan, 2, None)
    trainer = trainer_of(model, plan, device=GPU)
    actual_losses, actual_norms = trained(trainer, 2)
    assert actual_losses == pytest.approx(losses, rel=1e-5)
    assert actual_norms == pytest.approx(norms, rel=1e-4)
    weights = weights_in(trainer)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [QWEN3, MIXTURE, GEMMA2], ids=lambda model: model.name)
def test_first_loss_and_gradient_norm_are_those_in_memory(model: Model) -> None:
    """In bf16 with the same weights; attention in chunks, and the sums of gradients, round differently."""
    trainer = trainer_of(model, streaming_plan(model), device=GPU, initial=True)
    trainer.streams.wait()
    network = build_model(model).to(GPU, torch.bfloat16)
    with torch.no_grad():
        for name, weight in weights_in(trainer).items():
            network.get_parameter(name).copy_(weight)
    (loss,), (norm,) = trained(trainer, 1)
    tokens = synthetic_tokens(11, 0, (2, 1281), model.vocab, GPU)
    expected = network(tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    expected_norm = torch.nn.utils.get_total_norm([parameter.grad.float() for parameter in network.parameters()])
    assert loss == pytest.approx(expected.item(), rel=2e-3)
    assert norm == pytest.approx(expected_norm.item(), rel=2e-2)


def test_fp8_of_qwen3_follows_bf16() -> None:
    losses = {
        dtype: trained(
            trainer_of(QWEN3, streaming_plan(QWEN3, dtype=dtype), device=GPU, initial=True, rate=lambda _: 1e-4), 3
        )[0]
        for dtype in ("bf16", "fp8")
    }
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)


@pytest.mark.parametrize("model", [QWEN3, MIXTURE, GEMMA2], ids=lambda model: model.name)
def test_steps_never_synchronize(model: Model) -> None:
    trainer = trainer_of(model, streaming_plan(model), device=GPU, initial=True)
    trainer.step(1)  # compiles kernels and allocates pinned memory
    trainer.streams.wait()
    with no_synchronization():
        issued = [trainer.step(step) for step in (2, 3)]
    trainer.streams.wait()
    assert all(torch.isfinite(output.stats).all() for output in issued)


@pytest.mark.exclusive  # the host and device budgets
@pytest.mark.parametrize("model", [QWEN3, MIXTURE, GEMMA2], ids=lambda model: model.name)
def test_run_keeps_its_budgets(model: Model, tmp_path: Path) -> None:
    budgets = {"seqlen": 8192, "host_gib": 12.0, "device_gib": 8.0, "gbs": 8}
    result = best_plan(model, PlanConstraints(dtype="bf16", update="stochastic", **budgets), H200)
    config = RunConfig(
        name=model.name, target="outofcore_llama3", size="1b", machine=Machine(gpu="h200", gpus=1, gpus_per_node=8),
        model=model, parallel=Parallel(), precision=Precision(dtype="bf16"),
        workload=OutOfCore(**budgets, steps=4, window=(3, 4), plan=result.plan, lr=1e-5),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
    assert run(tmp_path / "config.json", EventRecorder(tmp_path, 0)) == 0
    events = list(read(tmp_path / "events.rank0.jsonl"))
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "ok"
    steps = [event for event in events if isinstance(event, StepDone)]
    assert all(event.memory_bytes <= 8 * GIB for event in steps)
    assert steps[-1].loss < steps[0].loss
