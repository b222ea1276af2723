"""Settings of published rows from the recipes that they name."""

import pytest

from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.published_rows import parse_row
from llmb.perfmodel.step_time.recipe_settings import _recipes
from llmb.perfmodel.step_time.step_setup import DTYPES

CARD = {
    "source": "NVIDIA-NeMo/Megatron-Bridge examples/model_verification_cards/qwen3-30b-a3b/card.yaml",
    "model": "qwen3", "size": "30b-a3b", "gpu": "gb200", "dtype": "fp8-mx", "gpus": "8",
    "notes": "grade=card-perf; recipe=qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config; verified=2026-07-23",
}  # fmt: skip


def test_a_row_that_names_its_recipe_gets_its_settings():
    setup = parse_row(CARD).setup
    assert (setup.mbs, setup.gbs, setup.seqlen, setup.parallel.ep) == (4, 512, 4096, 8)
    assert (setup.graphs, setup.dispatcher) == (1.0, "hybridep")
    assert (setup.overlap_experts, setup.fused_experts, setup.fp8_attention) == (True, True, True)


def test_cells_of_the_row_come_first():
    setup = parse_row(CARD | {"mbs": "2", "gbs": "128"}).setup
    assert (setup.mbs, setup.gbs) == (2, 128)


def test_recent_rows_without_knobs_get_those_of_the_same_model_gpu_and_dtype():
    row = CARD | {"mbs": "2", "gbs": "128", "seqlen": "4096", "tp": "1", "ep": "8"}
    recent = parse_row(row | {"notes": "verified=2026-08-01"}).setup
    assert (recent.dispatcher, recent.graphs, recent.mbs) == ("hybridep", 1.0, 2)
    described = parse_row(row | {"notes": "verified=2026-08-01; dispatcher=deepep"}).setup
    assert (described.dispatcher, described.graphs) == ("deepep", 0.0)
    older = parse_row(row | {"notes": "", "source": "NVIDIA-NeMo/Megatron-Bridge docs container-26.02@1"}).setup
    assert (older.dispatcher, older.graphs) == ("alltoall", 0.0)


def test_rows_get_what_their_release_configured_and_its_table_leaves_out():
    row = {
        "source": "NVIDIA-NeMo/Megatron-Bridge container-25.09@1", "model": "llama3", "size": "70b", "gpu": "gb200",
        "dtype": "fp8", "gpus": "64", "seqlen": "8192", "gbs": "128", "mbs": "2", "tp": "1", "fsdp": "64",
    }  # fmt: skip
    assert parse_row(row).setup.offload_layers == 40
    assert parse_row(row | {"source": "container-26.02"}).setup.offload_layers == 0
    assert parse_row(row | {"dtype": "fp8-mx", "tp": "2", "pp": "4", "fsdp": "0"}).setup.mbs == 1


def test_settings_of_a_release_hold_for_every_dtype_unless_they_name_one():
    row = {
        "source": "NVIDIA-NeMo/Megatron-Bridge container-25.11@1", "model": "deepseek-v3", "gpu": "h100",
        "gpus": "1024", "seqlen": "4096", "gbs": "8192", "mbs": "1", "tp": "2", "pp": "8", "vp": "4", "ep": "64",
    }  # fmt: skip
    for dtype in ("bf16", "fp8-cs", "fp8-sc"):
        setup = parse_row(row | {"dtype": dtype}).setup
        assert (setup.dispatcher, setup.overlap_experts) == ("deepep", True)
        assert setup.recompute_modules == ("mla_up_proj", "mlp")
    b200 = parse_row(row | {"dtype": "fp8-mx", "gpu": "b200", "gpus": "256", "tp": "1", "pp": "16", "ep": "8"}).setup
    assert (b200.dispatcher, b200.overlap_experts) == ("alltoall", False)
    assert parse_row(row | {"dtype": "bf16", "source": "container-26.04"}).setup.dispatcher == "alltoall"


def test_a_measured_run_that_cannot_fit_as_described_has_recomputed():
    row = {"model": "llama4-scout", "gpu": "gb200", "dtype": "bf16", "gpus": "256", "seqlen": "8192", "mbs": "10",
           "tp": "1", "ep": "16", "fsdp": "256", "notes": "framework=torchtitan; no AC"}  # fmt: skip
    assert parse_row(row).setup.recompute == "none"
    assert parse_row(row | {"tokens_per_s_per_gpu": "6169"}).setup.recompute == "full"
    assert parse_row(row | {"tokens_per_s_per_gpu": "6169", "mbs": "2"}).setup.recompute == "none"


def test_a_batch_that_contradicts_the_printed_tflops_is_refused():
    tokens = 512 * 4096
    seconds = 23.0e9 * tokens / 8 / 900e12
    good = parse_row(CARD | {"step_time_s": str(seconds), "tflops_per_gpu": "900"})
    assert good.step_time_s == pytest.approx(seconds)
    doubled = parse_row(CARD | {"step_time_s": str(2 * seconds), "tflops_per_gpu": "900"})
    assert doubled.reason == "the batch of its recipe does not give the printed TFLOP/s"


def test_every_recipe_is_of_a_known_model_and_dtype_and_divides_its_batch():
    for name, settings in _recipes().items():
        assert find_model(settings["model"]).model.layers, name
        assert settings["dtype"] in DTYPES, name
        replicas = settings["gpus"] // (settings["tp"] * settings["pp"] * settings.get("cp", 1))
        assert replicas >= 1, name
        assert settings["gbs"] % settings["mbs"] == 0, name
