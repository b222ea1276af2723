"""Properties of random predictions: finite, consistent, within the chip's limits, monotone; rows as calls."""

import math
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmb.errors import ConfigError
from llmb.perfmodel.chip_limits import training_limits
from llmb.perfmodel.explain.explanation import step_amount
from llmb.perfmodel.serving_time.serving_bounds import ServedFigures, serving_limits
from llmb.perfmodel.serving_time.serving_fields import build_serving_setup
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_rows import parse_serving_row
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.cluster_fabric import FABRICS, device
from llmb.perfmodel.step_time.predictor import predict
from llmb.perfmodel.step_time.published_rows import parse_row
from llmb.perfmodel.step_time.setup_fields import build_setup, changed_device, parse_settings
from llmb.perfmodel.step_time.step_constants import ENGINES

MODELS = (
    "llama3.1-8b", "llama3.1-70b", "qwen3-235b-a22b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b",
    "nemotron-h-56b", "qwen3-next-80b-a3b", "glm-4.5",
)  # fmt: skip
WORSE = ("gpu.hbm_bw=0.7x", "gpu.flops=0.7x", "gpu.nvlink=0.7x")
ROUNDING = 1e-9
KINKS = 0.005  # where a prompt no longer fits whole into a step, by which a worse request may be predicted better
FEW_TOKENS = 6  # with fewer output tokens, more clients move some time from TPOT to TTFT: up to 5 % of TPOT with two
GROWN_CLIENTS = 0.05  # by which the sum of both may exceed the clients: ramp-up and drain of a finite benchmark


@st.composite
def requests(draw):
    shape, gpu = find_model(draw(st.sampled_from(MODELS))), draw(st.sampled_from(sorted(FABRICS)))
    values = {"tp": draw(st.sampled_from((1, 2, 4, 8, 8))), "pp": draw(st.sampled_from((1, 1, 2, 4)))}
    if shape.model.experts and draw(st.booleans()):
        values |= {"ep": values["tp"]} | draw(
            st.sampled_from(({}, {"tp": 1, "attention_dp": values["tp"]}, {"draft_tokens": 3}))
        )
    lengths = draw(st.integers(1, 40_000)), draw(st.integers(1, 4) | st.integers(2, 4096))
    engine, dtype = draw(st.sampled_from(("vllm", "sglang", "trtllm"))), draw(st.sampled_from(("bf16", "fp8", "nvfp4")))
    try:
        setup = build_serving_setup(shape, gpu, dtype, engine, lengths, draw(st.integers(1, 2048)), values)
        predict_serving(setup)
    except ConfigError:  # impossible layouts, models that do not fit
        assume(False)
    return setup


@settings(max_examples=60, deadline=None)
@given(setup=requests())
def test_a_served_prediction_is_consistent_and_possible(setup):
    p = predict_serving(setup)
    figures = {name: getattr(p, name) for name in p.interval_80}
    assert all(0 < value < math.inf for value in figures.values() if value is not None)
    assert all(low < figures[name] < high for name, (low, high) in ((n, i) for n, i in p.interval_80.items() if i))
    assert {name for name, value in figures.items() if value is None} == ({"tpot_ms"} if setup.osl == 1 else set())
    assert math.isclose(p.e2e_ms, p.ttft_ms + (setup.osl - 1) * (p.tpot_ms or 0.0))
    clients = p.output_tokens_per_s * p.e2e_ms / 1e3 / setup.osl
    assert (1 - GROWN_CLIENTS) * setup.concurrency <= clients <= (1 + ROUNDING) * setup.concurrency
    least = min(seconds for terms in p.terms.values() for seconds in terms.values())
    assert least >= -ROUNDING * p.e2e_ms
    latency = None if p.tpot_ms is None else (p.ttft_ms, p.tpot_ms)
    limits = serving_limits(setup, ServedFigures(output_tokens_per_s=p.output_tokens_per_s, latency_ms=latency))
    assert all(limit.needed <= limit.limit for limit in limits)


@settings(max_examples=60, deadline=None)
@given(setup=requests(), worse=st.sampled_from(WORSE), more=st.integers(1, 4096))
def test_nothing_improves_when_the_chip_or_the_load_gets_worse(setup, worse, more):
    p = predict_serving(setup)
    slower = predict_serving(setup, changed_device(device(setup.gpu), worse))
    assert slower.output_tokens_per_s <= p.output_tokens_per_s * (1 + KINKS)
    assert slower.e2e_ms >= p.e2e_ms * (1 - KINKS)
    assert setup.osl == 1 or slower.tpot_ms >= p.tpot_ms * (1 - KINKS)
    crowded = predict_serving(replace(setup, concurrency=setup.concurrency + more))
    assert setup.osl < FEW_TOKENS or crowded.tpot_ms >= p.tpot_ms * (1 - KINKS)
    try:
        longer = predict_serving(replace(setup, isl=setup.isl + more))
    except ConfigError:  # does not fit
        return
    assert longer.output_tokens_per_s <= p.output_tokens_per_s * (1 + KINKS)
    assert longer.e2e_ms >= p.e2e_ms * (1 - KINKS)


@st.composite
def runs(draw):
    shape, mbs = find_model(draw(st.sampled_from(MODELS))), draw(st.sampled_from((1, 1, 2, 4)))
    values = {"tp": draw(st.sampled_from((1, 2, 8))), "pp": draw(st.sampled_from((1, 2, 8))), "mbs": mbs}
    values |= {"cp": draw(st.sampled_from((1, 1, 2))), "seqlen": draw(st.sampled_from((2048, 8192, 131072)))}
    values |= {"vp": draw(st.sampled_from((2, 3)))} if values["pp"] > 1 and draw(st.booleans()) else {}
    values |= {"ep": draw(st.sampled_from((1, 8, 32)))} if shape.model.experts else {}
    values |= {"engine": draw(st.sampled_from(tuple(ENGINES))), "fsdp": values["pp"] == 1 and draw(st.booleans())}
    values |= {"recompute": draw(st.sampled_from(("none", "selective", "full")))}
    values |= {"task": draw(st.sampled_from(("pretrain", "pretrain", "sft", "lora")))}
    gpus = 1 << draw(st.integers(0, 14))
    values["gbs"] = (
        max(1, gpus // (values["tp"] * values["pp"] * values["cp"])) * mbs * draw(st.sampled_from((1, 3, 16)))
    )
    dtype = draw(st.sampled_from(("bf16", "fp8", "fp8-mx", "nvfp4")))
    try:
        setup = build_setup(shape, draw(st.sampled_from(sorted(FABRICS))), gpus, dtype, values)
        predict(setup)
    except ConfigError:
        assume(False)
    return setup


@settings(max_examples=50, deadline=None)
@given(setup=runs())
def test_a_training_prediction_is_consistent_and_possible(setup):
    p = predict(setup)
    assert all(
        0 < value < math.inf for value in (p.step_time_s, p.tokens_per_s_per_gpu, p.tflops_per_gpu, p.memory_gib)
    )
    assert p.interval_80[0] < p.step_time_s < p.interval_80[1]
    assert math.isclose(sum(p.terms.values()), p.step_time_s)
    assert min(p.terms.values()) >= 0
    assert 0 < p.mfu < 1
    assert all(limit.needed <= limit.limit for limit in training_limits(step_amount(setup), p.step_time_s))
    # Native casts of weights are once a step; a pipeline that is never full counts them with every idle micro-batch.
    is_full = setup.ga >= setup.parallel.pp or setup.engine != "native"
    assert not is_full or predict(replace(setup, gbs=2 * setup.gbs)).step_time_s > p.step_time_s


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    gpu=st.sampled_from(("h100", "b200", "gb300")),
    dtype=st.sampled_from(("bf16", "fp8", "mxfp8", "nvfp4")),
    engine=st.sampled_from((*ENGINES, "nemo", "maxtext")),
    fields=st.fixed_dictionaries(
        {"seqlen": st.sampled_from((2048, 8192)), "mbs": st.sampled_from((1, 2)), "gbs": st.sampled_from((128, 512))},
        optional={
            "tp": st.sampled_from((2, 4)), "pp": st.sampled_from((2, 4)), "cp": st.just(2), "vp": st.just(2),
            "ep": st.just(8), "fsdp": st.sampled_from(("true", "false")), "recompute": st.just("full"),
            "cuda_graphs": st.just("true"), "recompute_layers": st.just(2), "task": st.sampled_from(("sft", "lora")),
        },
    ),
)  # fmt: skip
def test_a_row_is_predicted_as_a_call(name, gpu, dtype, engine, fields):
    texts = {field: str(value) for field, value in fields.items()} | {"engine": engine}
    row = parse_row({"model": name, "gpu": gpu, "dtype": dtype, "gpus": "128", "tp": "1", **texts})
    try:
        values = parse_settings([f"{field}={value}" for field, value in ({"tp": 1} | texts).items()])
        call = build_setup(find_model(name), gpu, 128, dtype, values)
    except ConfigError:
        return
    assert row.setup is not None, row.reason
    assert predict(row.setup) == predict(call)


@settings(max_examples=40, deadline=None)
@given(setup=requests())
def test_a_load_in_a_file_is_described_as_a_call(setup):
    cells = {
        "model": setup.shape.model.name, "backend": setup.engine, "system": setup.gpu, "precision": setup.dtype,
        "isl": setup.isl, "osl": setup.osl, "concurrency": setup.concurrency, "tp": setup.tp, "pp": setup.pp,
        "attention_dp": setup.attention_dp, "draft_tokens": setup.draft_tokens or "",
    }  # fmt: skip
    if setup.ep > 1:
        cells["moe_ep"] = setup.ep
    row = parse_serving_row({name: str(cell) for name, cell in cells.items()})
    assert row.setup == setup, row.reason
