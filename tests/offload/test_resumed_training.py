"""A run that was interrupted goes on bit for bit, and under another plan as close as rounding allows."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from nightly_cases import by_turns
from reference_training import LEAST, UNTIED, trained, trainer_of, weights_in

from llmb.config.offload_plan import UPDATES, Plan
from llmb.config.spec import OutOfCore
from llmb.errors import ConfigError
from llmb.models.hf_weights import load_weights
from llmb.models.llama import Llama
from llmb.offload.hf_export import export
from llmb.offload.offload_checkpoint import checkpoint_identity, resume_point, save
from llmb.offload.offload_loop import all_buckets
from llmb.offload.offload_loop import load_weights as load_checkpoint
from llmb.offload.trainer import Trainer
from llmb.runtime.checkpoint_folder import complete_checkpoints

STOPPED, STEPS = 3, 6
PLAN = replace(LEAST, gbs=3, chunk_tokens=6, levels="FAIFAI")
OTHER = replace(
    LEAST, gbs=3, chunk_tokens=4, groups_per_round=2, levels="F" * 18, update_at="forward", resident_params=3,
    resident_states=5, resident_grads=1, inp_slots=5, kv_slots=3,
)  # fmt: skip


WORK = OutOfCore(seqlen=PLAN.seqlen, host_gib=1.0, device_gib=1.0, steps=STEPS, checkpoint_every=STOPPED)


def stopped(plan: Plan, folder: Path) -> list[float]:
    """Losses of the steps until the checkpoint."""
    trainer = trainer_of(UNTIED, plan)
    losses, _ = trained(trainer, STOPPED)
    save(folder, STOPPED, all_buckets(trainer), checkpoint_identity(UNTIED, plan, WORK, None), trainer.scales)
    return losses


def resumed(plan: Plan, folder: Path) -> tuple[list[float], Trainer]:
    """Losses of the steps behind it."""
    work = replace(WORK, resume=str(folder))
    point = resume_point(work, folder / "next", checkpoint_identity(UNTIED, plan, work, None))
    trainer = trainer_of(UNTIED, plan)
    load_checkpoint(trainer, point)
    return trained(trainer, STEPS, first=STOPPED + 1)[0], trainer


KEPT_FORMATS = [("fp32", "master"), ("bf16", "stochastic"), ("fp8", "master")]
OTHER_FORMATS = [
    (dtype, update) for dtype in ("bf16", "fp8") for update in UPDATES if (dtype, update) not in KEPT_FORMATS
]
UPDATE_AT = ("forward", "backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "update_at"),
    [
        *by_turns(KEPT_FORMATS, UPDATE_AT),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in product(OTHER_FORMATS, UPDATE_AT)),
    ],
    ids=str,
)
def test_resuming_changes_no_bit(tmp_path: Path, formats: tuple[str, str], update_at: str) -> None:
    dtype, update = formats
    plan = replace(PLAN, dtype=dtype, update=update, update_at=update_at)
    straight = trainer_of(UNTIED, plan)
    losses, _ = trained(straight, STEPS)
    assert stopped(plan, tmp_path) == losses[:STOPPED]
    remaining, trainer = resumed(plan, tmp_path)
    assert remaining == losses[STOPPED:]
    expected = weights_in(straight)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_in(trainer).items())


def test_trained_weights_are_exported(tmp_path: Path) -> None:
    trainer = trainer_of(UNTIED, OTHER)
    trained(trainer, 2)
    export(tmp_path / "out", UNTIED, all_buckets(trainer))
    network = Llama(UNTIED)
    load_weights(network, tmp_path / "out")
    expected = weights_in(trainer)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in network.named_parameters())


def test_a_damaged_bucket_is_named_and_the_older_checkpoint_offered(tmp_path: Path) -> None:
    trainer = trainer_of(UNTIED, PLAN)
    identity = checkpoint_identity(UNTIED, PLAN, WORK, None)
    for step in (1, 2):
        save(tmp_path, step, all_buckets(trainer), identity)
    older, newest = complete_checkpoints(tmp_path / "checkpoints")
    file = newest / "unit_0001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    point = resume_point(replace(WORK, resume=str(tmp_path)), tmp_path / "next", identity)
    with pytest.raises(ConfigError) as error:
        load_checkpoint(trainer, point)
    changed = f"resume: {newest} is damaged: {file.name} is not what was written: its checksum differs"
    assert str(error.value) == f"{changed}; resume={older} continues from an older one"
