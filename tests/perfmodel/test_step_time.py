"""The step-time predictor: formulas by hand, terms that sum, monotonicity."""

import re
from dataclasses import replace

import pytest
from step_setups import step_setup

from llmb.config.model import Model
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.block_costs import BLOCK_COSTS
from llmb.perfmodel.pipeline_schedule import bubble
from llmb.perfmodel.shapes.model_catalog import find_model, run_shape
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, device
from llmb.perfmodel.step_time.collective_time import Transfer, rank_traffic
from llmb.perfmodel.step_time.fitted_constants import native_constants
from llmb.perfmodel.step_time.gemm_shapes import Gemm, block_gemms, expert_rows, padded_flops
from llmb.perfmodel.step_time.predictor import log_half_width, model_flops, predict
from llmb.perfmodel.step_time.saved_activations import saved_fraction
from llmb.perfmodel.step_time.setup_fields import changed_device, parse_scales, scaled
from llmb.perfmodel.step_time.step_constants import CONSTANTS_FILE, calibrated, constants
from llmb.perfmodel.step_time.step_work import block_counts, launched, rank_work, softmax_cost, stage_layers
from llmb.perfmodel.step_time.waterfall import TERMS, rates, step_terms, step_work, transfer_time

LLAMA_70B = step_setup("llama3.1-70b", "h100", 64, "fp8", gbs=128, tp=4, pp=4, cp=2, vp=5)
LLAMA_8B = step_setup("llama3.1-8b", "h100", 8, "bf16", gbs=128, fsdp=True)
GROK = step_setup("grok1", "gb200", 128, "bf16", gbs=256, tp=4, ep=8, etp=4)
QWEN = step_setup("qwen3-30b-a3b", "b200", 64, "fp8-mx", seqlen=4096, gbs=512, ep=64)
NEMOTRON_H = step_setup("nemotron-h-56b", "h100", 32, "fp8", gbs=96, tp=8)
SETUPS = (LLAMA_70B, LLAMA_8B, GROK, QWEN, NEMOTRON_H)


def saved_bytes_per_token(setup):
    """Bytes that an average layer saves for backward."""
    model = setup.shape.model
    values = sum(count * BLOCK_COSTS[kind](model).saved_values for kind, count in model.blocks.items() if count)
    return 2 * values / model.layers * saved_fraction(setup)


def test_a_gemm_loses_half_a_wave_and_fills_its_pipeline():
    waves = (16384 / 128) * (4096 / 256) / 132
    flops = 2.0 * 16384 * 4096 * 4096
    assert padded_flops(16384, 4096, 4096, 1, sms=132) == pytest.approx(flops * (1 + 0.5 / waves) * (1 + 128 / 4096))


def test_a_small_gemm_costs_at_most_twice_and_n_is_padded():
    assert padded_flops(128, 256, 4096, 1, 132) == pytest.approx(2 * 2.0 * 128 * 256 * 4096 * (1 + 1 / 32))
    assert padded_flops(8192, 2880, 4096, 1, 132) == padded_flops(8192, 3072, 4096, 1, 132)
    assert padded_flops(8192, 100, 4096, 1, 132) == padded_flops(8192, 128, 4096, 1, 132)


def test_uneven_experts_leave_half_a_tile_empty():
    even, uneven = (padded_flops(512, 2048, 2048, 16, 148, ragged) for ragged in (False, True))
    assert uneven / even == pytest.approx((512 + 64) / 512)


def test_chunks_of_an_overlapped_gemm_lose_a_quarter_wave_each():
    whole, chunked = (padded_flops(16384, 4096, 4096, 1, 132, chunks=chunks) for chunks in (1, 8))
    waves = (16384 / 128) * (4096 / 256) / 132
    assert chunked / whole == pytest.approx((1 + (0.5 + 7 * 0.25) / waves) / (1 + 0.5 / waves))


def test_gemms_are_chunked_where_megatron_overlaps_a_ring_with_them():
    """Forward of both splits, and the input gradient of a weight split by rows; experts and the head have no ring."""
    plain = replace(LLAMA_70B, overlap_tp=False)
    chunked, whole = (rank_work(setup, device("h100")) for setup in (LLAMA_70B, plain))

    def is_longer(passes, reference):
        return [a.flops > b.flops for a, b in zip(passes, reference, strict=True)]

    assert is_longer(chunked.forward.gemms, whole.forward.gemms) == [True] * 4
    # Of QKV, projection, gate and up, down: gradients of input and of weight.
    assert is_longer(chunked.backward.gemms, whole.backward.gemms) == [False, False, True, False] * 2
    assert chunked.head == whole.head
    titan = replace(LLAMA_70B, engine="torchtitan")
    assert rank_work(titan, device("h100")).forward.gemms == whole.forward.gemms


def test_gemms_of_a_tensor_parallel_layer_have_its_shapes():
    tokens = 8192 // 2
    columns, rows = ((8192 + 2 * 1024) / 4, 8192), (8192, 2048)
    attention = [Gemm(tokens, *columns, tp_split="columns"), Gemm(tokens, *rows, tp_split="rows")]
    assert block_gemms(LLAMA_70B, "attention") == attention
    columns, rows = (2 * 28672 / 4, 8192), (8192, 7168)
    mlp = [Gemm(tokens, *columns, tp_split="columns"), Gemm(tokens, *rows, tp_split="rows")]
    assert block_gemms(LLAMA_70B, "mlp") == mlp


def test_experts_see_the_tokens_of_their_group():
    """128 experts, 8 per token: 64 ranks with 4,096 tokens each give an expert 64 * 4,096 * 8 / 128."""
    assert expert_rows(QWEN) == 16384
    routed = [gemm for gemm in block_gemms(QWEN, "experts") if gemm.count > 1]
    assert [gemm.count for gemm in routed] == [2, 2]


@pytest.mark.parametrize("setup", SETUPS)
def test_gemms_of_all_ranks_are_the_models(setup):
    """Without the wave and fill overheads, GEMMs, attention and scan of all ranks are the model's FLOPs."""
    model, split = setup.shape.model, setup.parallel
    macs = sum(
        count * gemm.macs
        for kind, count in model.blocks.items() if count
        for gemm in block_gemms(setup, kind) if gemm.low
    )  # fmt: skip
    head = setup.tokens * model.hidden * model.vocab / split.tp
    work = rank_work(setup, device(setup.gpu))
    attention = work.forward.attention_flops / softmax_cost(model, FABRICS[setup.gpu].family) * split.pp
    mamba = model.blocks.get("mamba", 0) and model.blocks["mamba"] * BLOCK_COSTS["mamba"](model).scan_macs
    scan = 2 * mamba * setup.tokens / split.tp
    total = setup.dp * split.cp * split.tp * setup.ga * 3 * (2 * (macs + head) + attention + scan)
    assert total == pytest.approx(model_flops(setup), rel=1e-3)


def test_groups_leave_the_link_domain_when_they_must():
    inside = rank_traffic(QWEN, rank_work(QWEN, device("gb200")), device("gb200")).ep
    outside = rank_traffic(QWEN, rank_work(QWEN, device("b200")), device("b200")).ep
    assert inside.network_bytes == 0
    token_bytes, passes = 4096 * 2048 * 2, 4 * 48
    assert outside.network_bytes == pytest.approx(passes * token_bytes * 8 * 7 / 8)


@pytest.mark.parametrize("engine", ["megatron-2024", "megatron", "megatron-bridge", "jax"])
def test_data_parallel_bytes_of_a_replicated_model(engine):
    """NVIDIA's recipes of Megatron reduce gradients in bf16."""
    gradient_bytes = 4 if engine == "jax" else 2
    setup = replace(LLAMA_8B, parallel=Parallel(), engine=engine)
    traffic = rank_traffic(setup, rank_work(setup, device("h100")), device("h100"))
    matrices = 8.03e9
    assert traffic.dp.link_bytes == pytest.approx((2 + gradient_bytes) * matrices * 7 / 8, rel=0.01)
    assert traffic.dp_gradients == pytest.approx(gradient_bytes / (2 + gradient_bytes))


@pytest.mark.parametrize(("dtype", "weight_bytes"), [("fp8", 1), ("fp8-block", 2), ("fp8-mx", 2), ("nvfp4", 2)])
def test_weights_of_one_scale_are_gathered_in_fp8(dtype, weight_bytes):
    """All but embedding and LM head. MXFP8 cannot gather its rows' and columns' scales in one copy."""
    setup = replace(LLAMA_8B, parallel=Parallel(), engine="megatron-bridge", gpu="b200", dtype=dtype)
    work = rank_work(setup, device("b200"))
    traffic = rank_traffic(setup, work, device("b200"))
    ends = 2 * 128256 * 4096
    blocks = work.dense_weights - ends
    gathered, reduced = weight_bytes * blocks + 2 * ends, 2 * (blocks + ends)
    assert traffic.dp.link_bytes == pytest.approx((gathered + reduced) * 7 / 8)
    assert traffic.dp_gradients == pytest.approx(reduced / (gathered + reduced))
    jax = replace(setup, engine="jax")
    assert rank_traffic(jax, work, device("b200")).dp.link_bytes == pytest.approx(6 * (blocks + ends) * 7 / 8)


def test_megatron_accumulates_and_zeroes_gradients_in_bf16():
    """Per weight: zeroed once a step, read and written in every backward."""
    works = [rank_work(replace(LLAMA_8B, engine=engine), device("h100")) for engine in ("jax", "megatron")]
    jax, megatron = ((work.step_bytes, sum(gemm.bytes for gemm in work.backward.gemms)) for work in works)
    weights = works[0].dense_weights
    assert jax[0] - megatron[0] == pytest.approx(2 * weights)
    assert jax[1] - megatron[1] == pytest.approx(4 * (weights - works[0].end_weights), rel=1e-3)


def test_multi_token_prediction_adds_a_layer_and_a_head():
    """DeepSeek-V3 at 4,096 tokens: 249.8 GFLOP a token without, 260.0 with its prediction layer, as published."""
    setup = step_setup("deepseek-v3", "gb200", 64, "bf16", seqlen=4096, gbs=64, ep=64)
    without = replace(setup, shape=replace(setup.shape, mtp_depth=0))
    tokens = setup.gbs * setup.seqlen
    assert model_flops(without) / tokens == pytest.approx(249.8e9, rel=1e-3)
    assert model_flops(setup) / tokens == pytest.approx(260.0e9, rel=1e-3)
    added = {kind: count - block_counts(without)[kind] for kind, count in block_counts(setup).items()}
    assert added == {"mla": 1, "mlp": 0, "experts": 1}
    assert predict(setup).step_time_s > predict(without).step_time_s


def test_latent_experts_work_and_travel_at_their_width():
    """Nemotron 3 Super: 84.7 GFLOP a token published; a token of 1,024 values travels to 22 experts."""
    setup = step_setup("nemotron3-super", "gb200", 64, "bf16", gbs=64, ep=64, dispatcher="hybridep")
    assert model_flops(setup) / setup.gbs / setup.seqlen == pytest.approx(84.7e9, rel=0.01)
    routed = [gemm for gemm in block_gemms(setup, "experts") if gemm.count > 1]
    assert [(gemm.n, gemm.k) for gemm in routed] == [(2688, 1024), (1024, 2688)]
    traffic = rank_traffic(setup, rank_work(setup, device("gb200")), device("gb200"))
    assert traffic.ep.link_bytes == pytest.approx(4 * 42 * 8192 * 1024 * 2 * 22 * 63 / 64)


def test_cuda_graphs_replace_launches_of_the_parts_they_capture():
    kinds = ("attention", "mamba", "mlp", "experts")
    parts = replace(NEMOTRON_H, graph_parts=("attn", "mamba", "moe_router", "moe_preprocess"))
    assert [launched(NEMOTRON_H, kind) for kind in kinds] == [1, 1, 1, 1]
    assert [launched(parts, kind) for kind in kinds] == pytest.approx([0, 0, 1, 0.6])
    assert launched(replace(parts, graph_parts=("moe_router",)), "mamba") == 1
    assert launched(replace(NEMOTRON_H, graphs=1.0), "mamba") == 0
    assert predict(parts).step_time_s < predict(NEMOTRON_H).step_time_s


def test_the_host_replays_every_block_that_is_a_graph_of_its_own():
    parts = replace(NEMOTRON_H, graph_parts=("attn", "mamba"))
    assert rank_work(NEMOTRON_H, device("h100")).captured_blocks == 0
    assert rank_work(parts, device("h100")).captured_blocks == 54 + 10
    assert rank_work(replace(NEMOTRON_H, graphs=1.0), device("h100")).captured_blocks == 0  # the whole step is one
    c = calibrated()
    slow_replay = c | {"host_replay": 10 * c["host_replay"]}
    assert predict(parts, c=slow_replay).terms["host"] > predict(parts, c=c).terms["host"]


def test_the_first_micro_batch_has_no_all_to_all_to_overlap_with():
    once, often = (replace(QWEN, gbs=64 * ga, overlap_experts=True) for ga in (1, 64))
    alone = replace(once, overlap_experts=False)
    assert predict(once).terms["ep"] == pytest.approx(predict(alone).terms["ep"])
    assert predict(often).terms["ep"] < 64 * 0.7 * predict(once).terms["ep"]


def test_recomputed_experts_are_dispatched_again():
    """Half of the all-to-all is the forward's; the host reads the token counts of recomputed layers twice."""
    plain, first_layer, all_layers = (
        predict(replace(QWEN, recompute="full" if layers else "none", recompute_layers=layers)).terms
        for layers in (None, 1, 48)
    )
    assert all_layers["recompute"] > plain["ep"] / 2
    assert first_layer["recompute"] == pytest.approx(all_layers["recompute"] / 48)
    assert first_layer["host"] - plain["host"] < (all_layers["host"] - plain["host"]) / 24


def test_recomputed_modules_cost_their_own_gemms():
    """Three of DeepSeek-V3's 61 layers have a dense MLP, and Megatron's module mlp is no other."""
    setup = step_setup("deepseek-v3", "h100", 1024, "bf16", seqlen=4096, gbs=8192, tp=2, pp=8, vp=4, ep=64)
    mlp, moe = (predict(replace(setup, recompute_modules=(name,))).terms["recompute"] for name in ("mlp", "moe"))
    macs = {
        kind: count * BLOCK_COSTS[kind](setup.shape.model).token_macs for kind, count in block_counts(setup).items()
    }
    assert mlp / moe == pytest.approx(macs["mlp"] / macs["experts"], rel=0.02)  # the router is one of the GEMMs


def test_offloaded_activations_take_time_where_the_link_is_slow():
    """40 of 80 layers of 70b: hidden behind the compute of a GB200, whose host link is seven times that of an H100."""
    setup = step_setup("llama3.1-70b", "gb200", 64, "fp8", mbs=2, gbs=256, fsdp=True, offload_layers=40)
    assert predict(setup).terms["offload"] == 0
    slow = predict(replace(setup, gpu="h100"))
    copy = 40 * saved_bytes_per_token(setup) * 2 * 8192 / (64e9 * calibrated()["host_link"])
    gpu_time = (slow.step_time_s - slow.terms["offload"]) / setup.ga
    assert 2 * copy - gpu_time < slow.terms["offload"] / setup.ga < 2 * copy


def test_the_native_engine_hides_the_copies_of_a_layer_behind_the_next_one():
    setup = step_setup("llama3.1-8b", "h200", 1, "bf16", mbs=4, gbs=16, engine="native", offload_layers=13)
    times = [predict(replace(setup, offload_layers=layers)) for layers in (0, 13, 26)]
    offload = [prediction.terms["offload"] for prediction in times]
    assert offload[0] == 0
    assert offload[2] == pytest.approx(2 * offload[1])
    layer = 4 * 8192 * 2 * (4 * 4096 + 2 * 1024 + 2 * 14336)  # input, q, k, v, attention output, residual, gate and up
    copy = 13 * layer / (64e9 * calibrated()["host_link"])
    computing = (times[1].step_time_s - offload[1]) / setup.ga * 13 / 32  # of these layers, with some of the head
    assert 2 * copy - computing < offload[1] / setup.ga < copy


def test_softcap_kernels_take_longer_with_wide_heads_and_windows_less():
    wide = find_model("gemma-2-9b").model
    narrow = replace(wide, heads=32, kv_heads=16, head_dim=128)
    setup = step_setup("gemma-2-9b", "h200", 1, "bf16", gbs=4, engine="native")

    def seconds(model: Model, **changes: object) -> float:
        return predict(replace(setup, shape=run_shape(replace(model, **changes)))).terms["attention"]

    c = native_constants("work")
    for model, ratio in ((wide, c["softcap_wide"]), (narrow, c["softcap"])):
        assert seconds(model, attn_logit_softcap=50.0) / seconds(model) == pytest.approx(ratio)
    windowed = seconds(wide, attention_pattern="SF", window=4096)
    assert windowed / seconds(wide) == pytest.approx((1 + 0.75) / 2)  # half of the layers: three quarters of the pairs


def test_transfers_use_links_and_network_at_once():
    c = calibrated() | {"link": 0.5, "network": 0.5, "latency": 1e-5}
    both = Transfer(link_bytes=450e9, network_bytes=50e9, hops=100)
    assert transfer_time(both, device("h100"), c) == pytest.approx(2.0 + 1e-3)


def test_a_ring_of_more_chunks_hides_more_of_a_tp_collective():
    """The same bytes in chunks of a fourth and of an eighth: the first and last of them are exposed."""
    c = calibrated()
    for tp in (2, 4, 8):
        setup = step_setup("llama3.1-70b", "h100", 64, "bf16", gbs=64, tp=tp)
        exposed, whole = predict(setup).terms["tp"], predict(replace(setup, overlap_tp=False)).terms["tp"]
        assert exposed / whole == pytest.approx(min(1.0, c["tp_chunks"] / tp))
    native = step_setup("llama3.1-70b", "h100", 64, "bf16", gbs=64, tp=8, engine="native")
    assert predict(native).terms["tp"] == predict(replace(native, overlap_tp=False)).terms["tp"]  # it waits for them


@pytest.mark.parametrize("setup", SETUPS)
def test_terms_sum_to_the_step_time(setup):
    prediction = predict(setup)
    assert set(prediction.terms) == set(TERMS)
    assert sum(prediction.terms.values()) == pytest.approx(prediction.step_time_s)
    assert all(seconds >= -1e-9 for name, seconds in prediction.terms.items() if name != "engine")
    low, high = prediction.interval_80
    assert low < prediction.step_time_s < high
    assert 0 < prediction.mfu < 1


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("change", ["gpu.hbm_bw=2x", "gpu.flops=2x", "gpu.nvlink=2x", "network=2x"])
def test_better_hardware_is_never_slower(setup, change):
    assert predict(setup, changed_device(device(setup.gpu), change)).step_time_s <= predict(setup).step_time_s + 1e-12


@pytest.mark.parametrize("setup", SETUPS)
def test_more_work_takes_longer(setup):
    base = predict(setup).step_time_s
    assert predict(replace(setup, recompute="full")).step_time_s > base
    assert predict(replace(setup, gbs=2 * setup.gbs)).step_time_s > base
    assert predict(replace(setup, seqlen=2 * setup.seqlen)).step_time_s > base
    assert predict(replace(setup, graphs=1.0)).step_time_s <= base


def test_idle_time_of_the_pipeline_is_that_of_the_schedule():
    """Without head or uneven layers, warm-up and cool-down are the simulated bubble."""
    setup = replace(LLAMA_70B, parallel=Parallel(tp=4, pp=4, vp=5), gpus=16, gbs=16)
    shape = replace(setup.shape, model=replace(setup.shape.model, vocab=1))
    terms = step_terms(step_work(replace(setup, shape=shape)), calibrated())
    outside = ("dp", "optimizer", "overhead", "jitter", "engine")
    pipeline = sum(seconds for name, seconds in terms.items() if name not in outside)
    assert terms["bubble"] / pipeline == pytest.approx(bubble(4, 5, setup.ga), abs=2e-3)


def test_stages_of_a_hybrid_count_by_the_work_of_their_layers():
    """118 layers over 8 ranks: the first has 7 of 54 Mamba and 7 of 54 MLP blocks, the last 6 of each."""
    assert stage_layers(LLAMA_70B) == (20, 20)
    uneven = replace(LLAMA_70B, parallel=Parallel(tp=4, pp=8), gpus=32)
    assert stage_layers(replace(uneven, layers=77)) == (10, 7)
    fullest, last = stage_layers(step_setup("nemotron-h-56b", "h100", 32, "fp8", gbs=96, tp=4, pp=8))
    macs = {kind: BLOCK_COSTS[kind](NEMOTRON_H.shape.model).token_macs for kind in ("mamba", "mlp", "attention")}
    average = (54 * macs["mamba"] + 54 * macs["mlp"] + 10 * macs["attention"]) / 118
    assert fullest == pytest.approx((7 * macs["mamba"] + 7 * macs["mlp"] + macs["attention"]) / average)
    assert last == pytest.approx((6 * macs["mamba"] + 6 * macs["mlp"] + macs["attention"]) / average)
    assert fullest > 15  # layers


def test_weak_scaling_grows_slowly():
    times = [predict(scaled(NEMOTRON_H, gpus)).step_time_s for gpus in parse_scales("32..2048")]
    assert times == sorted(times)
    assert times[-1] / times[0] < 1.06


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 60}, "tp x pp x cp = 32 does not divide 60 GPUs"),
        ({"gbs": 3}, "not a multiple of dp x mbs"),
        ({"dtype": "fp7"}, "unknown dtype 'fp7'"),
        ({"dtype": "nvfp4"}, "h100 has no nvfp4 GEMMs; data types are: bf16, fp8, fp8-row, fp8-block, fp8-mx"),
        ({"gpu": "a100"}, "a100 has no fp8 GEMMs; data types are: bf16"),
        ({"mbs": 0}, "mbs must be a whole number"),
        ({"parallel": Parallel(tp=4, pp=4, cp=2, vp=80)}, "pp x vp = 320 stages for 80 layers; use at most 80"),
        ({"parallel": Parallel(pp=2, vp=41), "engine": "native"}, "pp x vp = 82 stages for 80 layers"),
        (
            {"shape": QWEN.shape, "parallel": Parallel(tp=4, pp=4, cp=2, ep=32)},
            "ep x etp = 32 does not divide the 16 GPUs of a pipeline stage; ep could be 1, 2, 4, 8, 16",
        ),
        ({"parallel": Parallel(ep=8)}, "Llama-3.1-70B has no experts: ep 8 is not possible, use tp, pp or fsdp"),
        ({"parallel": Parallel(tp=3), "gpus": 48, "gbs": 96}, "tp 3 does not divide 64 attention heads; possible: [1"),
    ],
)
def test_impossible_descriptions_say_what_is_wrong(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        replace(LLAMA_70B, **changes)


@pytest.mark.parametrize("gpu", FABRICS)
def test_no_gpu_exceeds_its_peak(gpu):
    """A large dense model without communication: the H20, whose clock is the highest of its family, is the nearest."""
    setup = step_setup("llama3.1-70b", gpu, 1, "bf16", gbs=16, mbs=16)
    assert predict(setup).mfu < 0.93
    step = step_work(setup)
    assert rates(step, calibrated()).bf16 < step.device.gpu.peak_flops["bf16"]


def test_windows_of_the_catalog_are_counted_as_they_are_published():
    """gpt-oss 120B at 4,096 tokens: 32.6 GFLOP/token in Megatron Bridge's tables from 26.06."""
    oss = step_setup("gpt-oss-120b", "gb300", 64, "bf16", seqlen=4096, gbs=512, ep=8)
    assert model_flops(oss) / oss.gbs / oss.seqlen == pytest.approx(32.6e9, rel=0.002)
    gemma = step_setup("gemma-2-9b", "h20", 8, "bf16", seqlen=131072, gbs=2, tp=4)
    assert predict(gemma).mfu < 0.93


def test_native_recipes_with_many_scales_take_longer():
    """Casts of their own, and slower GEMMs with scales of blocks: 17,363, 15,697 and 13,238 tokens/s on an H200."""
    tensor, rows, blocks = (
        predict(replace(LLAMA_8B, gpu="h200", gpus=1, gbs=4, engine="native", parallel=Parallel(), dtype=dtype)).terms
        for dtype in ("fp8", "fp8-row", "fp8-block")
    )
    assert tensor["gemm"] == rows["gemm"] < blocks["gemm"]
    assert tensor["quantization"] < rows["quantization"] < blocks["quantization"]


def test_every_constant_is_positive_used_and_documented():
    source = "".join(path.read_text() for path in CONSTANTS_FILE.parent.glob("*.py"))
    for name, constant in constants().items():
        assert constant.prior > 0
        assert constant.value is None or constant.value > 0
        assert constant.unit
        assert constant.meaning
        stem = re.sub(r"_(ampere|hopper|blackwell)$", "_{", name)
        stem = re.sub(r"^gemm_(bf16|fp8|nvfp4)_{", "gemm_", stem)
        assert stem in source, name


def test_the_interval_is_wider_for_what_is_rarer():
    assert log_half_width(LLAMA_70B) < log_half_width(GROK)
    assert log_half_width(replace(LLAMA_70B, gpu="b300")) > log_half_width(LLAMA_70B)
