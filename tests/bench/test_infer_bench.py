"""Arithmetic of bench/infer_gpu.py: ceilings by hand, against `llmb.perfmodel.flops`, and against the engine."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from small_models import deepseek_model, gpt_oss_model, llama_model

import llmb.ops
from llmb.config.model import MlaConfig, MoEConfig
from llmb.config.spec import Precision
from llmb.perfmodel import block_costs, flops, params
from llmb.serve.engine_builder import serving_dtypes
from llmb.serve.layers.served_model import build_served_model
from llmb.serve.rank_groups import RankGroups
from llmb.serve.weights.weight_source import RandomWeights

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
ceilings, kernels, program = (
    import_module(name) for name in ("inference.infer_ceilings", "inference.infer_kernels", "infer_gpu")
)

FP8 = Precision(dtype="fp8", kv_dtype="fp8")
BF16 = Precision(dtype="bf16", kv_dtype="bf16")
SMALL = llama_model(
    name="small", hidden=8, ffn=16, heads=2, kv_heads=1, vocab=10
)  # attention 2 * 8 * (8 + 4) = 192 weights a layer, MLP 3 * 8 * 16 = 384, head 80
MOE = deepseek_model(
    name="moe", layers=3, hidden=8, ffn=16, heads=2, kv_heads=2, vocab=10,
    experts=MoEConfig(count=4, top_k=1, ffn=4, shared=1, dense_layers=1),
    mla=MlaConfig(q_rank=4, kv_rank=6, nope_dim=4, rope_dim=2, value_dim=4),
)  # fmt: skip
RATES = ceilings.Rates(read=100.0, products=1000.0, head=100.0, bf16=50.0)


def by_name(model, precision, step):
    return {term.name: term for term in ceilings.terms(model, precision, step)}


def test_average_step_has_its_fraction_of_prompts():
    step = ceilings.steady_step(isl=4, osl=4, batch=8)
    # Of 8 requests in flight 6 generate, at 4 + 4 / 2 tokens; 2 prompts of 4 tokens are read, 8 pairs each.
    assert step == ceilings.Step(decodes=6, context=6, prompt_tokens=8, prompt_pairs=16, samples=8)
    assert step.tokens == 14


def test_each_term_is_bytes_and_flops_by_hand():
    actual = by_name(SMALL, FP8, ceilings.steady_step(isl=4, osl=4, batch=8))
    assert {name: (term.bytes, term.flops) for name, term in actual.items()} == {
        "attention weights": (384, 2 * 14 * 384),
        "cache": (6 * 6 * 2 * 8, 2 * 6 * 6 * 2 * 16),
        "prompts": (0, 2 * 16 * 2 * 16),
        "mlp weights": (768, 2 * 14 * 768),
        "head": (160, 2 * 8 * 80),
    }


def test_windows_and_mxfp4_experts_by_hand():
    """Two layers, one with a window of 3 tokens; experts in 4.25 bits, everything else in bf16."""
    model = gpt_oss_model(name="oss", hidden=32, heads=2, kv_heads=1, head_dim=16, vocab=10, window=3)
    step = ceilings.steady_step(isl=4, osl=4, batch=8)
    actual = by_name(model, Precision(dtype="mxfp4", kv_dtype="fp8"), step)
    expert = 3 * 32 * 32
    read = 2 * ceilings.distinct_experts(4, 2, 14) * expert
    assert actual["experts"].bytes == pytest.approx(read * 4.25 / 8)
    assert actual["experts"].flops == 2 * 14 * 2 * 2 * expert
    assert actual["attention weights"].bytes == 2 * 2 * 2 * 32 * (32 + 16)
    assert actual["cache"].bytes == 6 * (6 + 3) * 2 * 16  # of 6 cached tokens on average, 6 and 3 are read
    # Pairs of a prompt as counted elsewhere, half of 4 x 4; with the window 4 x 3 - 3 x 3 / 2.
    assert actual["prompts"].flops == 2 * 2 * (8 + 7.5) * 2 * 32


@pytest.mark.nightly
def test_models_bench_runs_without_a_gpu(tmp_path):
    command = [sys.executable, "models_gpu.py", "--tiny", "--row", "gpt-oss-20b mxfp4 1000,Qwen3-30B", "--json"]
    subprocess.run([*command, str(tmp_path / "models.json")], cwd=BENCH, check=True)
    results = json.loads((tmp_path / "models.json").read_text())["models"]
    assert [result["model"] for result in results] == ["gpt-oss-20b", "Qwen3-30B-A3B"]
    assert all(result["whole"] > 0 and result["ceiling"] > 0 for result in results)


def test_a_changed_row_of_a_published_model_has_that_budget_and_fp8_recipe():
    from inference.model_rows import ROWS, changed_row

    qwen, oss = (next(row for row in ROWS if row.model == model) for model in ("Qwen3-32B", "gpt-oss-20b"))
    changed = changed_row(qwen, 512, "channelwise")
    assert (changed.budget, changed.precision.fp8_recipe, changed.precision.kv_dtype) == (512, "channelwise", "fp8")
    assert changed_row(qwen, None, None) == qwen
    assert changed_row(oss, None, "channelwise") == oss, "its experts are in MXFP4"


def test_ceiling_adds_the_longer_of_bytes_and_flops():
    actual = ceilings.terms(SMALL, FP8, ceilings.steady_step(isl=4, osl=4, batch=8))
    seconds = {"attention weights": 10.752, "cache": 46.08, "prompts": 20.48, "mlp weights": 21.504, "head": 12.8}
    assert {term.name: term.seconds(RATES) for term in actual} == pytest.approx(seconds)
    assert ceilings.ceiling(actual, RATES) == pytest.approx(sum(seconds.values()))
    assert ceilings.by_kind(actual, RATES) == pytest.approx(
        {ceilings.PRODUCTS: 45.056, ceilings.DECODE: 46.08, ceilings.PREFILL: 20.48}
    )


def test_memory_bounds_a_step_of_one_request():
    actual = ceilings.terms(SMALL, BF16, ceilings.decode_step(1, context=10))
    fast = ceilings.Rates(read=100.0, products=1e9, head=1e9, bf16=1e9)
    # 1152 weights and the head's 80 in 2 bytes, 10 tokens of 2 layers with 8 values of 2 bytes.
    assert ceilings.ceiling(actual, fast) == pytest.approx((2 * 1152 + 160 + 10 * 2 * 16) / 100)


@pytest.mark.parametrize("precision", [FP8, BF16])
def test_sums_equal_those_of_costs(precision):
    decode = ceilings.terms(SMALL, precision, ceilings.decode_step(5, context=7))
    assert sum(term.bytes for term in decode) == pytest.approx(params.decode_bytes(SMALL, precision, 5, 7))
    assert sum(term.flops for term in decode) == pytest.approx(5 * flops.decode_flops(SMALL, 7))
    prompt = ceilings.terms(SMALL, precision, ceilings.prompt_step(9))
    assert sum(term.flops for term in prompt) == pytest.approx(flops.prefill_flops(SMALL, 9, "causal"))


def test_mla_and_moe_by_hand():
    actual = by_name(MOE, FP8, ceilings.decode_step(3, context=10, experts=2.5))
    # kv_up: 6 * 2 * (4 + 4) = 96 weights in bf16; the other matrices of attention:
    matrices = 8 * (4 + 6 + 2) + 4 * 2 * (4 + 2) + 2 * 4 * 8
    assert actual["mla weights"].bytes == 3 * matrices
    assert actual["kv_up"].bytes == 3 * 2 * 96
    assert actual["cache"].bytes == 3 * 10 * 3 * (6 + 2 * 2)
    assert actual["cache"].flops == 2 * 3 * 10 * 3 * 2 * (2 * 6 + 2)
    item = 3 * 8 * 4
    assert actual["experts"].bytes == 2 * 2.5 * item
    assert actual["experts"].flops == 2 * 3 * 2 * item
    assert actual["experts weights"].bytes == 2 * item  # the shared ones
    assert actual["router"].bytes == 2 * 2 * 8 * 4


def test_expected_experts():
    assert ceilings.distinct_experts(256, 8, 1) == pytest.approx(8)
    assert ceilings.distinct_experts(4, 2, 2) == pytest.approx(3)  # each is missed by both with 1/4
    assert ceilings.distinct_experts(256, 8, 64) == pytest.approx(222.4, abs=0.1)
    assert by_name(MOE, FP8, ceilings.decode_step(2, context=1))["experts"].bytes == pytest.approx(2 * 1.75 * 96)


def test_one_gpu_of_expert_parallelism_reads_its_experts():
    step = ceilings.step_of_one_gpu(2, MOE, ceilings.decode_step(1, context=1))
    assert step.experts == pytest.approx(1.75 / 2)  # two tokens visit 1.75 of 4 experts
    # Three GPUs, 5 tokens each, 2 layers of experts: 2 x 5 tokens of 8 x 2 bytes arrive, and as many leave.
    assert ceilings.collective_seconds(3, MOE, tokens=5, link=10.0) == pytest.approx(2 * 2 * 160 / 10)


def test_worked_examples_of_the_documentation():
    llama, few = program.models()
    rates = ceilings.Rates(read=4.3e12, products=1.2e15, head=0.7e15, bf16=0.7e15)
    needed = ceilings.terms(llama, FP8, ceilings.steady_step(1000, 1000, 960))
    milliseconds = {term.name: 1e3 * term.seconds(rates) for term in needed}
    page = {"attention weights": 4.29, "mlp weights": 18.03, "cache": 21.92, "prompts": 0.36, "head": 1.44}
    assert milliseconds == pytest.approx(page, abs=0.005)
    assert 960 / ceilings.ceiling(needed, rates) == pytest.approx(20_848, abs=1)

    whole = replace(few, layers=61, experts=replace(few.experts, dense_layers=3))
    step = ceilings.step_of_one_gpu(8, whole, ceilings.steady_step(1000, 1000, 256))
    assert 1e3 * ceilings.ceiling(ceilings.terms(whole, FP8, step), rates) == pytest.approx(43.62, abs=0.005)
    assert 1e3 * ceilings.collective_seconds(8, whole, step.tokens, 450e9) == pytest.approx(13.24, abs=0.005)


def test_activations_by_hand():
    # A layer in fp8: norms 2 * 8 * 7, rotation 2 * (8 + 8 + 8) + 8 cached, rounding 8 * 3, the gate 16 * 5.
    assert ceilings.small_bytes(SMALL, FP8) == 2 * (112 + 56 + 24 + 80)
    assert ceilings.small_bytes(MOE, FP8) is None


def test_gemm_shapes_are_all_of_a_dense_layer():
    llama, deepseek = program.models()
    kv_up = 512 * 128 * (128 + 128)
    for model, attention, absorbed in ((llama, block_costs.attention, 0), (deepseek, block_costs.mla, kv_up)):
        weights = sum(outputs * inputs for outputs, inputs in ceilings.product_shapes(model))
        assert weights == attention(model).dense_weights - absorbed + block_costs.mlp(model).dense_weights


@pytest.mark.parametrize("precision", [FP8, BF16])
@pytest.mark.parametrize("which", [0, 1])
def test_ceilings_count_the_cache_of_the_engine(which, precision):
    model = program.tiny_models()[which]
    row = program.Row(dtype=precision.dtype, isl=8, osl=8, batch=1, budget=8, requests=1)
    device = torch.device("cpu")
    how = serving_dtypes(import_module("inference.infer_serving").config_of(model, row, device))
    stack = build_served_model(model, RandomWeights(model, 1, how.dtype, device), how, RankGroups(device=device))
    held = sum(mixer.bytes_per_token for mixer in stack.mixers())
    assert held == model.layers * ceilings.cached_bytes(model, precision)


def test_every_serving_kernel_has_a_class():
    served = (
        "activation/activation", "attention/decode_attention", "attention/kv_cache_write", "attention/mla_attention",
        "attention/paged_attention", "gemm/block_scaled_gemm", "gemm/skinny_gemm", "moe/align", "moe/fused_moe",
        "moe/fused_moe_fp8", "moe/fused_moe_fp4",
        "moe/router", "norm/add_rms_norm", "quant/activation_quant", "sampling/argmax",
    )  # fmt: skip
    for module in served:
        text = (Path(llmb.ops.__file__).parent / f"{module}_triton.py").read_text()
        for name in re.findall(r"^ *(_\w+)\[", text, re.MULTILINE):
            assert kernels.kind_of(name) != kernels.OTHER, f"{module}_triton.py: {name}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNN", ceilings.PRODUCTS),
        ("_skinny_gemm", ceilings.PRODUCTS),
        ("_decode_attention", ceilings.DECODE),
        ("_paged_decode", ceilings.DECODE),
        ("_paged_prefill", ceilings.PREFILL),
        ("_chunk_argmax", ceilings.SAMPLING),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps>>",
            ceilings.SAMPLING,
        ),
        ("_moe_gated_act_kernel", ceilings.EXPERTS),
        ("_gated_activation", ceilings.SMALL),
        ("Memcpy HtoD (Pinned -> Device)", kernels.COPIES),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", kernels.OTHER),
    ],
)
def test_kernels_by_name(name, kind):
    assert kernels.kind_of(name) == kind


@pytest.mark.nightly
def test_infer_program_runs_on_any_machine(tmp_path):
    command = [sys.executable, BENCH / "infer_gpu.py", "--tiny", "--json", tmp_path / "results.json"]
    done = subprocess.run(
        [*command, "--row", "1000/1000", "--only", "throughput,latency,profile,deepseek"],
        capture_output=True, text=True, cwd=BENCH.parent, env={"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for title in ("1. Ceilings", "2. Offline throughput", "3. One request", "4. DeepSeek-R1", "5. Time of a step"):
        assert title in done.stdout
    assert "seconds in all" in done.stdout
    assert (tmp_path / "results.json").stat().st_size > 1000


@pytest.mark.nightly
@pytest.mark.parametrize("program", ["last_wave_gpu.py", "speculative_gpu.py"])
def test_program_of_batches_and_drafts_runs_on_any_machine(tmp_path, program):
    done = subprocess.run(
        [sys.executable, BENCH / program, "--tiny", "--json", tmp_path / "results.json"],
        capture_output=True, text=True, cwd=BENCH.parent, env={"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "batch" in done.stdout
    assert (tmp_path / "results.json").stat().st_size > 50


def test_block_scaled_product_is_that_of_the_values() -> None:
    x8_NK, w8_OK = (torch.randn(rows, 256).to(torch.float8_e4m3fn) for rows in (32, 384))
    out_NO = import_module("measure.scaled_product").scaled_product(x8_NK, w8_OK, "blockwise")()
    assert torch.equal(out_NO, (x8_NK.float() @ w8_OK.float().T).bfloat16())
