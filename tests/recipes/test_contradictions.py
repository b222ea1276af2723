"""Contradictions within the sources of recipes: the list is complete, and its arithmetic holds.

Every derived figure of the sources is recomputed from its inputs; mismatches must be listed.
"""

import ast
import importlib.util
import operator
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from llmb.config.recipe import Row, load_all, per_gpus, shipped
from llmb.perfmodel import hardware

RECIPES = load_all([shipped()])
PAGE = Path(__file__).parents[2] / "docs" / "references.md"
_generator = importlib.util.spec_from_file_location("references", PAGE.with_suffix(".py"))
assert _generator is not None
assert _generator.loader is not None
references = importlib.util.module_from_spec(_generator)
_generator.loader.exec_module(references)
LLAMA, NEMOTRONH, GROK1 = "pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1"
DEEPSEEK, OUTOFCORE = "inference_deepseek-r1", "outofcore_llama3"

SOURCES = {
    LLAMA: "NVIDIA dgxc-benchmarking, Llama 3.1 recipe",
    NEMOTRONH: "NVIDIA dgxc-benchmarking, Nemotron-H recipe (NeMo 25.04.01)",
    GROK1: "NVIDIA dgxc-benchmarking, Grok-1 recipe (NeMo 25.04.00)",
    DEEPSEEK: "NVIDIA dgxc-benchmarking, DeepSeek-R1 recipe",
    OUTOFCORE: "als244/ml_dataflow, profile of Llama 3 8B",
}

NUMBERS = {
    LLAMA: [(91339, 91316), (126.72, 126.75), (1636.8, 1800.6)],
    NEMOTRONH: [(395895, 395888), (768, 384), (472.74, 42.4)],
    GROK1: [
        (572679, 1145359), (20.2, 10.1), (807684, 1615368), (14.33, 7.16), (14.41, 14.42), (32.2, 32.1), (49, 4900),
        (26.3, 32.9), (1192.94, 1156.87),
    ],
    DEEPSEEK: [(960, 640), (4000, 14400), (256, 1024), (512, 1024), (450, 3600), (3000, 30720)],
    OUTOFCORE: [],
}  # fmt: skip

WORDS = {
    LLAMA: [
        "MFU example", "Slurm reservation example", "experiment name", "ADDITIONAL_SLURM_PARAMS", "viewing profiles",
    ],
    NEMOTRONH: [
        "step time of the example output", "TFLOPS_per_GPU", "workload folder", "experiment name", "profiled steps",
        "viewing profiles",
    ],
    GROK1: [
        "step time of the example output", "tokens per second example", "supported GPUs", "memory needed",
        "model flops", "workload folder", "experiment name", "profiled steps", "viewing profiles",
    ],
    DEEPSEEK: [
        "H100 chat, max_num_tokens", "H100 summarization, num_requests", "B200 reasoning", "B200 chat",
        "B200 summarization", "B200 generation", "direct method", "time limits", "out of memory", "results",
        "result folder", "corrupted weights", "profiling", "launcher command", "viewing profiles",
    ],
    OUTOFCORE: ["overview of each picture"],
}  # fmt: skip

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def value_of(formula: str) -> float:
    """Evaluate an arithmetic formula; anything but numbers and + - * / ** is rejected."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant), ast.dump(node)
        return node.value

    return value(ast.parse(formula, mode="eval").body)


def rounded_like(printed: float, value: float) -> float:
    """Round `value` to as many decimals as `printed` has."""
    decimals = -min(0, int(Decimal(str(printed)).as_tuple().exponent))
    return round(value, decimals) if decimals else round(value)


def test_only_recipes_with_a_source_have_contradictions() -> None:
    assert {name for name, recipe in RECIPES.items() if references.contradictions(recipe)} == set(SOURCES)


@pytest.mark.parametrize("workload", SOURCES)
def test_list_of_contradictions_is_complete(workload: str) -> None:
    entries = references.contradictions(RECIPES[workload])
    assert {c["source"] for c in entries} == {SOURCES[workload]}
    assert [(c["printed"], c["computed"]) for c in entries if "computed" in c] == NUMBERS[workload]
    assert [c["where"] for c in entries if "says" in c] == WORDS[workload]
    assert len(entries) == len(NUMBERS[workload]) + len(WORDS[workload])


@pytest.mark.parametrize(
    "entry", [c for r in RECIPES.values() for c in references.contradictions(r)], ids=lambda c: c["where"]
)
def test_each_entry_is_complete_and_its_arithmetic_holds(entry: dict[str, Any]) -> None:
    if "computed" in entry:
        assert set(entry) == {"source", "where", "printed", "computed", "how"}
        assert rounded_like(entry["computed"], value_of(entry["how"])) == entry["computed"] != entry["printed"]
    else:
        assert set(entry) == {"source", "where", "says", "but"}


# Constants of the sources: FLOPs of one sequence. The Llama recipe prints TFLOP/s instead.
MODEL_FLOPS = {NEMOTRONH: 2.816e15, GROK1: 4.27e15}


def derived(workload: str, published: Row) -> dict[str, float]:
    """Recompute the derived figures of a published run by the formulas and constants of its source."""
    gpus = published["gpus"]
    selectors = {k: published[k] for k in ("gpu", "size", "dtype", "gpus")}
    row = RECIPES[workload].matching(**selectors)[0]
    gbs = per_gpus(row["gbs"], gpus, "gbs")
    tokens_per_s = row["seqlen"] * gbs / published["step_time_s"]
    peak = hardware.peak_flops(published["gpu"], published["dtype"])
    assert peak is not None
    if workload in MODEL_FLOPS:
        mfu = gbs * MODEL_FLOPS[workload] / published["step_time_s"] / gpus / peak
    else:
        mfu = published["tflops_per_gpu"] * 1e12 / peak
    days = 1e12 / tokens_per_s / 86400
    return {"tokens_per_s": tokens_per_s, "mfu_percent": 100 * mfu, "days_per_1t_tokens": days}


def test_every_derived_figure_agrees_or_is_listed() -> None:
    mismatches = []
    for workload in (LLAMA, NEMOTRONH, GROK1):
        for published in RECIPES[workload].references:
            for figure, value in derived(workload, published).items():
                recomputed = rounded_like(published[figure], value)
                if recomputed != published[figure]:
                    mismatches.append((published["gpu"], published["dtype"], published["gpus"], figure))
                    assert (published[figure], recomputed) in NUMBERS[workload]
    assert mismatches == [
        ("gb200", "fp8", 128, "tokens_per_s"),
        ("gb200", "fp8", 128, "days_per_1t_tokens"),
        ("gb200", "bf16", 512, "tokens_per_s"),
        ("gb200", "bf16", 512, "days_per_1t_tokens"),
        ("gb200", "fp8", 256, "days_per_1t_tokens"),
        ("gb200", "fp8", 512, "tokens_per_s"),
        ("gb200", "fp8", 512, "days_per_1t_tokens"),
        ("h100", "fp8", 512, "mfu_percent"),
    ]


def test_every_inference_cell_follows_the_rules_or_is_listed() -> None:
    """Concurrency is max_batch_size * TP, requests are 10 * concurrency; a latency run has one request at a time."""
    mismatches = []
    for row in RECIPES[DEEPSEEK].rows:
        concurrency = 1 if row["mode"] == "min_latency" else row["max_batch_size"] * row["tp"]
        for cell, expected in (("concurrency", concurrency), ("num_requests", 10 * row["concurrency"])):
            if row[cell] != expected:
                mismatches.append((row["gpu"], row["use_case"], cell, row[cell], expected))
    assert mismatches == [
        ("gb200", "summarization", "concurrency", 960, 640),
        ("b200", "chat", "concurrency", 4000, 14400),
        ("b200", "summarization", "concurrency", 256, 1024),
        ("b200", "generation", "concurrency", 512, 1024),
        ("h100", "chat", "num_requests", 3000, 30720),
        ("h100", "generation", "concurrency", 450, 3600),
    ]
    assert {(printed, computed) for *_, printed, computed in mismatches} == set(NUMBERS[DEEPSEEK])


# Worked examples of the sources whose arithmetic is right; the others are in the list above.
EXAMPLES = [
    ("8192 * 64 / 5.74", 91339),
    ("1e12 / 91339 / 86400", 126.72),
    ("1636.8 / 4900 * 100", 33.40),
    ("8192 * 768 / 15.892", 395888),
    ("1e12 / 395895 / 86400", 29.24),
    ("768 * 2.816e15 / 15.892 / 256 / 1979e12 * 100", 26.86),
    ("2 * 8192 * 8192 * 32768 * 54", 237_494_511_599_616),
    ("(2 * 8192 * 8192 * 64 * 128 + 2 * 8192 * 8192 * 8 * 128 + 2 * 8192 * 8192 * 8192) * 10", 23_364_622_090_240),
    (
        "(8192 * 8192 * (256 * 64 * 3 + 8 * 256 * 2 + 256) + 8192 * 8192 * 2 * 256 + 2 * 8192 * 8192 * 2 * 256"
        " + 8192 * 256 * 256 * 8) * 54",
        199_690_209_460_224,
    ),
    ("8192 * 8192 * 131072", 8_796_093_022_208),
    ("8192 * 4096 / 24", 1398101),
    ("1e12 / 1398101 / 86400", 8.28),
    ("256 * 4.27e15 / 6.631 / 128 / 4.9e15 * 100", 26.3),
    ("12 * 64 * 6144**2 * (1 + 8 / 48 + 8192 / 6144 / 2)", 53_150_220_288),
    ("18 * 64 * 32768 * 6144 * 2", 463_856_467_968),
    ("6 * 128256 * 6144", 4_728_029_184),
    ("8192 * (53150220288 + 463856467968 + 4728029184) / 1e15", 4.27),
    ("32 * 4 - 35", 93),
]


@pytest.mark.parametrize(("formula", "printed"), EXAMPLES)
def test_other_worked_examples_are_right(formula: str, printed: float) -> None:
    assert rounded_like(printed, value_of(formula)) == printed


def test_model_flops_agree_with_the_sources() -> None:
    """Our MFU differs from the printed one by the rounding of the sources' constants only."""
    for workload in (NEMOTRONH, GROK1):
        for published in RECIPES[workload].references:
            actual = references.recompute(RECIPES[workload], published).mfu_percent
            assert actual == pytest.approx(published["mfu_percent"], rel=2e-3)
    (llama,) = RECIPES[LLAMA].references
    tflops = references.recompute(RECIPES[LLAMA], llama).tflops_per_gpu
    assert tflops is not None
    assert (llama["tflops_per_gpu"], round(tflops, 1)) in NUMBERS[LLAMA]


def test_page_on_disk_is_up_to_date() -> None:
    assert PAGE.read_text() == references.render(), "run: make docs"
