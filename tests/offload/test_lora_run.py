"""Whole LoRA runs: resumed, exported to PEFT, from imported weights, placed anywhere with the same bits, refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_reference import LORA, frozen_bits, lora_plan
from reference_training import LEAST, SEED, UNTIED, network_of, trained, trainer_of
from safetensors.torch import load_file
from small_models import qwen3_moe_model
from test_outofcore_run import CONFIG, losses, run_in

from llmb.config.native.lora_shapes import lora_of
from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import ConfigError
from llmb.models.hf_weights import save_weights
from llmb.offload.lora.adapter_export import check_export
from llmb.offload.trainer import Trainer
from llmb.results.derive import derive
from llmb.runtime.checkpoint_folder import checkpoint_path
from llmb.runtime.synthetic_tokens import synthetic_tokens

BF16 = replace(LORA, frozen_weights="bf16")
FP8 = replace(LORA, frozen_weights="fp8")
PLAN = lora_plan(replace(LEAST, gbs=3, groups_per_round=2, chunk_tokens=6, levels="FAIFAIFAIFAI"))
WORK = OutOfCore(
    seqlen=10, host_gib=0.1, device_gib=0.1, update="master", clip=1.0, gbs=3, steps=4, window=(3, 4), lr=1e-2,
    lr_warmup_steps=2, lr_decay_steps=8, plan=PLAN, lora_rank=4, lora_alpha=6.0,
)  # fmt: skip
MIXTURE = qwen3_moe_model(name="mixture")


def with_work(**changes: Any) -> RunConfig:
    return replace(CONFIG, workload=replace(WORK, **changes))


def bits(trainer: Trainer) -> torch.Tensor:
    assert trainer.adapters is not None
    return torch.cat([tensor.view(torch.uint8) for tensor in trainer.adapters.tensors().values()])


def test_run_resumes_with_the_same_losses_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight, code = run_in(tmp_path / "straight", with_work(checkpoint_every=2, export=str(tmp_path / "all")))
    assert code == 0
    assert losses(straight)[-1] < losses(straight)[0]
    (file,) = checkpoint_path(tmp_path / "straight", 2).glob("*.safetensors")
    assert set(load_file(file)) == {"param", "m", "v"}
    resume = str(checkpoint_path(tmp_path / "straight", 2))
    resumed, code = run_in(tmp_path / "resumed", with_work(resume=resume, export=str(tmp_path / "rest")))
    assert code == 0
    assert losses(resumed) == losses(straight)[2:]
    exports = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("all", "rest")]
    assert all(torch.equal(value, exports[1][name]) for name, value in exports[0].items())
    result = derive(with_work(), straight)
    assert result.number_formats["lora_rank"] == 4
    for config, message in (
        (with_work(resume=resume, lora_alpha=8.0, plan=replace(PLAN, lora=replace(LORA, alpha=8.0))), "lora.alpha"),
        (
            replace(CONFIG, workload=replace(CONFIG.workload, resume=resume)),
            "holds LoRA adapters only; set lora_rank=4",
        ),
    ):
        events, code = run_in(tmp_path / "other", config)
        assert code == 1
        assert message in events[-1].reason


def test_imported_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    network = network_of(UNTIED)
    save_weights(network, tmp_path / "base", torch.float32)
    for lora in (LORA, FP8):
        trainer, expected = (trainer_of(UNTIED, replace(PLAN, lora=lora), initial=True) for _ in range(2))
        trainer.initialise(tmp_path / "base")
        assert not all(map(torch.equal, frozen_bits(trainer), frozen_bits(expected)))
        network.init_weights(SEED)
        save_weights(network, tmp_path / f"initial {lora.frozen_weights}", torch.float32)
        trainer.initialise(tmp_path / f"initial {lora.frozen_weights}")
        assert all(map(torch.equal, frozen_bits(trainer), frozen_bits(expected)))


def test_full_training_begins_with_imported_weights(tmp_path: Path) -> None:
    network = network_of(UNTIED)
    save_weights(network, tmp_path / "base", torch.float32)
    trainer = trainer_of(UNTIED, LEAST, initial=True)
    trainer.initialise(tmp_path / "base")
    assert trained(trainer, 2) == trained(trainer_of(UNTIED, LEAST), 2)


RESIDENT = {"resident_params": 7, "param_blocks": 0}
PLACEMENTS: list[dict[str, int]] = [{}, RESIDENT, {"resident_params": 3}, {"disk_params": 5}]


@pytest.mark.parametrize(("lora", "update"), [(BF16, "stochastic"), (FP8, "master")], ids=["bf16", "fp8"])
def test_placement_changes_no_bit(lora: Any, update: str, tmp_path: Path) -> None:
    plan = replace(PLAN, dtype="bf16", update=update, lora=lora)
    outcomes = []
    for placement in PLACEMENTS:
        trainer = trainer_of(UNTIED, replace(plan, **placement), initial=True, disk_path=tmp_path)
        before = frozen_bits(trainer)
        outcomes.append((trained(trainer, 3), bits(trainer)))
        assert all(map(torch.equal, frozen_bits(trainer), before))
    assert all(outcome[0] == outcomes[0][0] for outcome in outcomes)
    assert all(torch.equal(outcome[1], outcomes[0][1]) for outcome in outcomes)
    assert math.isfinite(outcomes[0][0][0][-1])


def test_step_with_non_finite_gradients_changes_nothing() -> None:
    trainer = trainer_of(UNTIED, PLAN, clip=1.0, initial=True)
    before = bits(trainer)
    with trainer.edit_tensors(2) as tensors:
        tensors[0][0, 0] = torch.inf
    trained(trainer, 1)
    assert torch.equal(bits(trainer), before)


@pytest.mark.parametrize(
    ("changes", "model", "dtype", "message"),
    [
        ({}, MIXTURE, "bf16", "lora_rank=4: .* experts of mixture must be None"),
        ({}, UNTIED, "fp8", "LoRA computes in bf16; use dtype=bf16"),
        ({"frozen_weights": "bf16"}, UNTIED, "fp32", "has no effect with fp32"),
        ({"lora_targets": ("qkv",)}, UNTIED, "bf16", "projection in lora_targets"),
        ({"lora_rank": 0}, UNTIED, "bf16", "lora_alpha has no effect without LoRA"),
        ({"lora_rank": 99}, UNTIED, "bf16", "is more than the rank"),
    ],
)
def test_what_lora_does_not_compute_is_refused(changes: dict, model: Any, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora_of(replace(WORK, **changes), model, dtype)


def test_stacked_projections_are_not_exported() -> None:
    check_export(UNTIED)
    with pytest.raises(ConfigError, match="has no q_proj of its own"):
        check_export(replace(UNTIED, name="stacked", architecture="phi3"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 8}, "lora_rank=8 and its settings, for which its plan was not made"),
        ({"weights": "/missing"}, "weights=/missing is no folder; name one in Hugging Face's layout"),
    ],
)
def test_settings_that_do_not_match_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    events, code = run_in(tmp_path, with_work(**changes))
    assert code == 1
    assert message in events[-1].reason


def test_adapters_load_into_peft(tmp_path: Path) -> None:
    """The loss of PEFT's model, of the base and the adapters that were exported, is that of the run's next step."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    _, code = run_in(tmp_path / "run", with_work(export=str(tmp_path / "adapters")))
    assert code == 0
    network = network_of(UNTIED)
    network.init_weights(WORK.seed)
    save_weights(network, tmp_path / "base", torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    assert {type(module).__name__ for module in adapted.modules()} >= {"Linear", "LlamaForCausalLM"}
    content = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"]) == (4, 6.0)
    shape = (PLAN.gbs, PLAN.seqlen + 1)  # the batch of step 5
    tokens = synthetic_tokens(WORK.seed, 4 * PLAN.gbs, shape, UNTIED.vocab, torch.device("cpu"))
    logits = adapted(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    events, _ = run_in(tmp_path / "one more", with_work(steps=5))
    assert losses(events)[4] == pytest.approx(loss.item(), rel=1e-5)
