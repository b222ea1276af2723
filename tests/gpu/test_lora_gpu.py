"""LoRA out of core on a GPU: the losses of a CPU, within its budget, wherever frozen weights live."""

from dataclasses import replace

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU
from lora_reference import LORA, frozen_bits, lora_plan, lora_trainer, random_adapters
from recipe_models import recipe_model
from reference_training import LEAST, SEED, UNTIED, trained

from llmb.config.offload_plan import PlanConstraints
from llmb.offload.arena import Budgets
from llmb.offload.chunked_batches import ChunkedBatches
from llmb.offload.trainer import Trainer, TrainerSettings
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.plan_search import best_plan

pytestmark = NEEDS_GPU

FP8 = replace(LORA, frozen_weights="fp8")


@pytest.mark.parametrize("lora", [LORA, FP8], ids=lambda lora: lora.frozen_weights)
def test_losses_are_those_of_a_cpu(lora) -> None:
    plan = lora_plan(replace(LEAST, chunk_tokens=4, levels="FAIAIFIFA"), lora)
    trainers = [lora_trainer(UNTIED, plan, 1.0, device=device) for device in (GPU, torch.device("cpu"))]
    for trainer in trainers:
        random_adapters(trainer.adapters.adapters)
    on_gpu, on_cpu = (trained(trainer, 3) for trainer in trainers)
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=1e-5)
    assert on_gpu[1] == pytest.approx(on_cpu[1], rel=1e-4)


@pytest.mark.parametrize("resident_params", [None, 0])
def test_1b_stays_within_its_budget_and_learns(resident_params: int | None) -> None:
    model = recipe_model("outofcore_llama3", "1b")
    constraints = PlanConstraints(
        dtype="bf16", seqlen=2048, host_gib=8, device_gib=8, gbs=4, resident_params=resident_params,
        lora=replace(FP8, rank=16, alpha=32.0),
    )  # fmt: skip
    result = best_plan(model, constraints, H200)
    batches = ChunkedBatches(model, result.plan, SEED, None, False, GPU)
    settings = TrainerSettings(
        seed=SEED, budgets=Budgets(host_gib=8, device_gib=8), host_slots=result.simulation.host_slots
    )
    trainer = Trainer(model, result.plan, GPU, settings, batches, lambda _: 1e-3)
    trainer.initialise()
    before = frozen_bits(trainer)
    losses, _ = trained(trainer, 6)
    assert losses[-1] < losses[0]
    assert trainer.arena.device_bytes <= 8 * GIB
    assert all(map(torch.equal, frozen_bits(trainer), before))
