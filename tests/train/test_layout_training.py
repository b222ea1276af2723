"""Each dimension of a layout, alone and with others, trains as one process does: losses, norms and weights.

Layouts of the recipes, over more steps, are in `test_parallel_layouts.py`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import SMALL_MODELS, UNEVEN
from training_ranks import Trained, outcome

pytestmark = pytest.mark.slow

MODELS = SMALL_MODELS | {
    "uneven": UNEVEN,
    "tied llama": replace(SMALL_MODELS["llama"], tied_embeddings=True),
    "four kv heads": replace(SMALL_MODELS["llama"], kv_heads=4),
    "five layers": replace(SMALL_MODELS["llama"], layers=5),
    "blocks": replace(SMALL_MODELS["llama"], hidden=128, ffn=256, heads=4, kv_heads=4, head_dim=64),
}
# In fp32 only the order of sums differs. In bf16 each rank rounds its partial output of a block; in fp8 some scales are
# those of a rank. Adam takes full steps even for gradients that are mostly rounding error.
CLOSE = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 6e-2}
PARALLEL = ("dp", "fsdp", "tp", "pp", "vp", "cp", "ep", "etp", "overlap_send", "recompute_layers", "offload_layers")
Case = tuple[str, dict[str, Any]]

CASES: list[Case] = [
    ("llama", {"dp": 2, "fsdp": True}),
    ("llama", {"dp": 2}),
    ("grok1", {"dp": 2, "fsdp": True, "recompute_layers": 2, "offload_layers": 1}),
    ("grok1", {"dp": 2, "fsdp": True, "dtype": "fp8", "balanced_experts": True}),
    ("uneven", {"dp": 3, "fsdp": True}),
    ("grok1", {"dp": 4, "ep": 2, "fsdp": True, "mbs": 1}),
    ("grok1", {"dp": 2, "etp": 2, "fsdp": True, "recompute_layers": 2}),
    ("grok1", {"dp": 2, "ep": 2, "dtype": "fp8", "balanced_experts": True}),
    ("deepseek", {"tp": 2}),
    ("tied llama", {"tp": 2}),
    ("nemotron_h", {"tp": 2, "dtype": "bf16"}),
    ("llama", {"cp": 2}),  # GQA
    ("llama", {"pp": 2, "dtype": "fp8", "fp8_recipe": "rowwise"}),
    ("blocks", {"dp": 2, "fsdp": True, "dtype": "fp8", "fp8_recipe": "blockwise"}),
    ("grok1", {"cp": 2}),  # logit softcap, and an auxiliary loss
    ("deepseek", {"cp": 2}),  # MLA
    ("nemotron_h", {"pp": 2}),
    # Biases of all projections, and sinks; with fewer sequences a bias has a gradient of rounding errors only.
    ("gpt_oss", {"tp": 2, "ep": 2, "gbs": 12}),
    ("grok1", {"pp": 2, "vp": 2}),
    ("five layers", {"pp": 2, "vp": 2}),
    ("llama", {"pp": 2, "vp": 2, "overlap_send": False}),
    ("deepseek", {"pp": 2, "recompute_layers": 1, "offload_layers": 1}),
]
NIGHTLY: list[Case] = [
    *(("grok1", {"dp": 2, "fsdp": True, "dtype": dtype}) for dtype in ("fp32", "fp8")),
    ("nemotron_h", {"dp": 2, "dtype": "bf16"}),
    ("uneven", {"dp": 3}),
    ("four kv heads", {"tp": 4}),
    ("nemotron_h", {"tp": 2, "dtype": "fp8"}),
    *((name, {"pp": 2}) for name in ("llama", "grok1", "deepseek")),
    ("five layers", {"pp": 4}),
    *(("llama", {**layout, "dtype": "fp8", "fp8_recipe": "rowwise"})
      for layout in ({"tp": 2}, {"cp": 2}, {"dp": 2, "fsdp": True}, {"tp": 2, "cp": 2})),
    *(("blocks", {**layout, "dtype": "fp8", "fp8_recipe": "blockwise"}) for layout in ({"tp": 2}, {"pp": 2})),
    ("gpt_oss", {"cp": 2}),  # windows and sinks
    ("gpt_oss", {"dp": 2, "ep": 2, "fsdp": True}),
    ("gpt_oss", {"pp": 2, "dtype": "bf16"}),
    ("mixtral", {"dp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 2}),
    *(("glm4_moe", {**layout, "gbs": 12}) for layout in ({"tp": 2, "ep": 2}, {"pp": 2}, {"cp": 2})),
    ("grok1", {"dp": 2}),
    *((name, {"dp": 2, "fsdp": fsdp}) for name in ("deepseek", "nemotron_h") for fsdp in (True, False)),
    *((name, {"dp": 4, "fsdp": fsdp, "mbs": 1}) for name in ("grok1", "nemotron_h") for fsdp in (True, False)),
    *((name, {"dp": 4, "fsdp": fsdp, "mbs": 3}) for name in ("llama", "grok1", "uneven") for fsdp in (True, False)),
    *(("llama", {"dp": 2, "fsdp": fsdp, "mbs": 6}) for fsdp in (True, False)),
    ("grok1", {"dp": 2, "fsdp": True, "dtype": "bf16"}),
    ("nemotron_h", {"dp": 2, "dtype": "fp8"}),
    *((name, {"dp": 3, "tp": 2, "fsdp": fsdp}) for name in ("uneven", "deepseek") for fsdp in (True, False)),
    ("grok1", {"dp": 2, "tp": 2, "ep": 2}),
    ("grok1", {"tp": 2, "cp": 2, "ep": 2, "etp": 2, "balanced_experts": True}),
    ("grok1", {"dp": 2, "dtype": "fp8", "balanced_experts": True}),
    ("deepseek", {"dp": 2, "ep": 2, "dtype": "bf16"}),
    ("deepseek", {"tp": 4, "ep": 2}),  # only the experts have replicas
    ("deepseek", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}),
    ("deepseek", {"dp": 4, "ep": 2, "fsdp": True, "recompute_layers": 3, "mbs": 1}),
    ("deepseek", {"tp": 4}),
    *((name, {"tp": 2, "dtype": dtype}) for name in ("grok1", "deepseek") for dtype in ("fp32", "bf16", "fp8")),
    *((name, {"pp": 2, "vp": 2}) for name in ("llama", "deepseek", "nemotron_h")),
    ("five layers", {"pp": 2}),
    *(("llama", {"pp": 2, "mbs": mbs}) for mbs in (4, 6)),  # three and two micro-batches
    ("grok1", {"pp": 2, "vp": 2, "recompute_layers": 2}),
    ("llama", {"pp": 2, "vp": 2, "offload_layers": 1}),
    ("llama", {"tp": 2, "cp": 2}),
    ("llama", {"pp": 2, "dp": 2, "fsdp": True, "offload_layers": 1}),
    *((name, {"pp": 2, "dp": 2, "fsdp": True, "recompute_layers": 1}) for name in ("grok1", "nemotron_h")),
    ("deepseek", {"cp": 2, "tp": 2, "ep": 2, "etp": 2}),
]  # fmt: skip


def few_micro_batches(cases: Iterable[Case]) -> list[Case]:
    """Return the cases with two micro-batches per replica and step, or four for a pipeline: collectives take long."""
    return [
        (name, {"gbs": changes.get("mbs", 2) * changes.get("dp", 1) * (4 if "pp" in changes else 2)} | changes)
        for name, changes in cases
    ]


def trained(name: str, **changes: Any) -> Trained:
    """Train two steps."""
    # With some other seeds a weight's first gradient is zero but for rounding, and Adam takes a full step for it.
    return outcome(MODELS[name], **({"mbs": 2, "gbs": 12, "steps": 2, "lr": 1e-3, "seed": 11} | changes))


def alone(name: str, changes: dict[str, Any]) -> Trained:
    """Train in one process that saves all activations."""
    return trained(name, **{key: value for key, value in changes.items() if key not in PARALLEL})


def named(cases: Iterable[Case], *marks: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(name, changes, id=f"{name} " + " ".join(f"{k}{v}" for k, v in changes.items()), marks=marks)
        for name, changes in cases
    ]


@pytest.mark.parametrize(("name", "changes"), [*named(few_micro_batches(CASES)), *named(NIGHTLY, pytest.mark.nightly)])
def test_layout_equals_one_process(name: str, changes: dict[str, Any]) -> None:
    distance = trained(name, **changes).max_distance(alone(name, changes))
    assert distance < CLOSE[changes.get("dtype", "fp32")]


@pytest.mark.parametrize(
    "changes",
    [
        {"dp": 2, "ep": 2, "balanced_experts": True},
        pytest.param({"tp": 2, "ep": 2}, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "fsdp": True}, marks=pytest.mark.nightly),
    ],
    ids=lambda changes: " ".join(f"{k}{v}" for k, v in changes.items()),
)
def test_fp8_layouts_of_gpt_oss_equal_one_process(changes: dict[str, Any]) -> None:
    """Biases and sinks are left out: they begin at zero, where the first steps of Adam have the sign of a rounding."""
    changes = {"dtype": "fp8", "gbs": 12} | changes
    runs = [
        replace(run, tensors={name: x for name, x in run.tensors.items() if x.dim() > 1 and not name.endswith("bias")})
        for run in (trained("gpt_oss", **changes), alone("gpt_oss", changes))
    ]
    assert {name for name in runs[0].tensors if ".down.weight" in name and name.startswith("model.")}
    assert runs[0].max_distance(runs[1]) < CLOSE["fp8"]


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.nightly), "fp8"])
def test_residual_is_sent_in_its_dtype(dtype: str) -> None:
    """Sends do not round: only the order of sums differs, and a last bit of a weight can flip one bf16 rounding."""
    split, reference = trained("grok1", gbs=8, dtype=dtype, pp=2), trained("grok1", gbs=8, dtype=dtype)
    assert split.losses[0] == pytest.approx(reference.losses[0], rel=1e-6)
    assert split.max_distance(reference) < 2**-8


@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("llama", {"dp": 2, "fsdp": True}, {"run": 1}),
        pytest.param("deepseek", {"tp": 2}, {"run": 1}, marks=pytest.mark.nightly),
        ("grok1", {"pp": 2, "vp": 2}, {"run": 1}),
        ("grok1", {"dp": 2, "fsdp": True}, {"overlap_gather": False, "overlap_reduce": False}),
        pytest.param("grok1", {"dp": 2}, {"overlap_gather": False, "overlap_reduce": False}, marks=pytest.mark.nightly),
        ("deepseek", {"tp": 2}, {"recompute_layers": 4}),
        pytest.param("nemotron_h", {"tp": 2}, {"recompute_layers": 4}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bits_are_the_same(name: str, layout: dict[str, Any], changes: dict[str, Any]) -> None:
    """In another run, without overlap of communication, and with recomputation."""
    [(_, layout)] = few_micro_batches([(name, layout)])
    actual, expected = trained(name, **layout, **changes), trained(name, **layout)
    assert (actual.losses, actual.norms) == (expected.losses, expected.norms)
    assert all(torch.equal(actual.tensors[key], tensor) for key, tensor in expected.tensors.items())
