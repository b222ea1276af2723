"""Serving memory: against counts by hand, the advice against itself, and every row of the recipes."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_models import GPT_OSS_20B, GPT_OSS_120B

from llmb.config.model import Model
from llmb.config.overrides import Setting
from llmb.config.recipe import expand_gpus, load_all, selector_values, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Inference, RunConfig
from llmb.perfmodel import block_costs, params, serving_capacity
from llmb.perfmodel.hardware import GIB

RECIPES = load_all([shipped()])
ROWS = [
    (recipe, row, dtype, gpu)
    for recipe in RECIPES.values()
    if recipe.kind == "inference"
    for row in recipe.rows
    for dtype in selector_values(row, "dtype")
    for gpu in selector_values(row, "gpu")
]


def resolved(workload: str, size: str, dtype: str, gpus: int, gpu: str, **fields: object) -> RunConfig:
    overrides = tuple(Setting(field=name, value=value, source="--set") for name, value in fields.items())
    return resolve(RECIPES[workload], RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, settings=overrides))


def llama(dtype: str = "fp8", gpus: int = 1, size: str = "8b", gpu: str = "h200", **fields: object) -> RunConfig:
    return resolved("inference_llama3.1", size, dtype, gpus, gpu, **fields)


def deepseek(**fields: object) -> RunConfig:
    return resolved("inference_deepseek-r1", "671b", "fp8", 16, "h100", **fields)


def with_work(config: RunConfig, **changes: object) -> RunConfig:
    assert isinstance(config.workload, Inference)
    return replace(config, workload=replace(config.workload, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "gib"), [(GPT_OSS_20B, 12.8), (GPT_OSS_120B, 60.8)])
def test_mxfp4_weights_are_as_large_as_the_published_checkpoints(model: Model, gib: float) -> None:
    """Experts in 4.25 bits, everything else in bf16, as the model card of gpt-oss prints."""
    config = llama("bf16")
    config = replace(config, model=model, precision=replace(config.precision, dtype="mxfp4"))
    assert serving_capacity.weight_bytes(config) / GIB == pytest.approx(gib, abs=0.05)


def test_tensor_parallelism_splits_all_but_embedding_and_norms() -> None:
    two = llama("bf16", 2, "70b")
    unsplit = replace(two, parallel=replace(two.parallel, tp=1))
    whole = 2 * (128256 * 8192 + (2 * 80 + 1) * 8192)  # bytes of the embedding and the norms
    assert serving_capacity.weight_bytes(two) - whole == (serving_capacity.weight_bytes(unsplit) - whole) / 2


def test_experts_are_split_with_attention_data_parallelism() -> None:
    config = deepseek()
    model = config.model
    moe = 3 * 7168 * 2048
    routed = 256 * moe
    # The second of two stages: 31 of 61 layers (the first has the 3 dense ones), the head, nothing shared but experts.
    attention = block_costs.mla(model)
    layer = attention.dense_weights + moe + routed / 8 + 2 * (attention.vector_weights + 2 * 7168 + 256 * 7168)
    head = 2 * (129280 * 7168 + 7168)
    stages = serving_capacity.stage_layers(61, 2, None)
    assert serving_capacity.weight_bytes(config) == pytest.approx(len(stages[1]) * layer + head, rel=1e-6)


def test_kv_cache_of_a_token() -> None:
    assert serving_capacity.token_bytes(llama("bf16")) == 2 * 2 * 8 * 128 * 32
    assert serving_capacity.token_bytes(llama("fp8")) == 2 * 8 * 128 * 32
    assert serving_capacity.token_bytes(llama("bf16", 2, "70b")) == 2 * 2 * 4 * 128 * 80
    many = llama("bf16", 2, "70b")
    many = replace(many, parallel=replace(many.parallel, tp=16))
    assert serving_capacity.token_bytes(many) == 2 * 2 * 1 * 128 * 80  # a rank has at least one head
    assert serving_capacity.token_bytes(deepseek()) == (512 + 2 * 64) * 31  # a latent is whole on every rank


def test_states_are_per_request_not_per_token() -> None:
    config = replace(with_work(llama(), max_batch_size=64), model=RECIPES["pretrain_nemotronh"].model("56b"))
    per_request = params.state_bytes_per_sequence(config.model)
    assert serving_capacity.state_bytes(config) == per_request > 0
    capacity = serving_capacity.cache_capacity(config, 100 * GIB)
    assert capacity.tokens == int((capacity.cache - 65 * per_request) // capacity.token) > 0  # one more is for padding
    full = with_work(config, max_batch_size=896)  # states of which alone are more than the cache
    assert serving_capacity.cache_capacity(full, 100 * GIB).tokens == 0
    message = serving_capacity.advice(full, 100 * GIB)
    assert message.startswith("the states of a batch of 896 need 768 GiB")
    (fixed,) = advised(full, 100 * GIB)
    assert serving_capacity.cache_capacity(fixed, 100 * GIB).tokens > 2048


def test_whole_requests_take_whole_blocks() -> None:
    config = with_work(llama(), isl=100, osl=1, block_tokens=64, kv_fraction=0.5)
    capacity = serving_capacity.cache_capacity(config, serving_capacity.workspace_bytes(config) + 4 * 128 * 65536.0)
    assert capacity.request == 128 * 65536
    assert (capacity.requests, capacity.tokens) == (2, 256)


@pytest.mark.parametrize(
    ("model", "isl", "osl", "whole", "windowed"),
    [
        (GPT_OSS_20B, 1000, 1000, 1193, 2118),
        (GPT_OSS_20B, 1024, 8192, 265, 515),
        (GPT_OSS_20B, 32768, 1024, 72, 143),
        (GPT_OSS_120B, 1024, 8192, 108, 210),
        (GPT_OSS_120B, 32768, 1024, 29, 58),
        (GPT_OSS_20B, 100, 100, 9551, 9551),  # hardly longer than the window
    ],
)
def test_windowed_layers_leave_their_memory_to_the_others(
    model: Model, isl: int, osl: int, whole: int, windowed: int
) -> None:
    """The table of docs/inference.md: half of the layers see 128 tokens, so a request takes little more than half."""
    config = replace(llama("bf16"), model=model)
    config = replace(config, precision=replace(config.precision, dtype="mxfp4"))
    config = with_work(config, isl=isl, osl=osl, max_batch_size=1024, max_num_tokens=8192, kv_fraction=0.9)
    free = serving_capacity.free_bytes(config)
    shared = with_work(config, prefix_cache=True)  # whose windowed layers keep whole sequences
    assert serving_capacity.cache_capacity(shared, free).requests == whole
    assert serving_capacity.cache_capacity(config, free).requests == windowed
    batch = serving_capacity.cache_capacity(with_work(config, max_batch_size=windowed), free)
    assert batch.tokens >= batch.requests * (isl + osl), "a batch of so many has blocks for all of them"


@pytest.mark.parametrize(("recipe", "row", "dtype", "gpu"), ROWS)
def test_every_recipe_row_fits_a_request_and_a_step(recipe, row, dtype, gpu) -> None:
    picks = {name: row[name] for name in ("mode", "use_case")}
    config = resolved(recipe.workload, row["size"], dtype, expand_gpus(row["gpus"])[0], gpu, **picks)
    assert serving_capacity.misfit(config) is None
    capacity = serving_capacity.cache_capacity(config, serving_capacity.free_bytes(config))
    assert capacity.missing == 0
    if recipe.workload == "inference_llama3.1":  # ours, made so that no request waits for blocks
        assert capacity.requests >= row["max_batch_size"]


def advised(config: RunConfig, free: float) -> list[RunConfig]:
    """Return the run with each remedy that the advice names."""
    message = serving_capacity.advice(config, free)
    fields = {"KV_CACHE_FRACTION": ("kv_fraction", float), "MAX_NUM_TOKENS": ("max_num_tokens", int),
              "MAX_BATCH_SIZE": ("max_batch_size", int)}  # fmt: skip
    remedy = message.rpartition("; ")[2]
    if shorter := re.match(r"use requests of at most (\d+) tokens at KV_CACHE_FRACTION=([\d.]+),", remedy):
        return [with_work(config, isl=int(shorter[1]) - 1, osl=1, kv_fraction=float(shorter[2]))]
    remedies = []
    for alternative in remedy.split(" or "):
        changes = {
            fields[name][0]: fields[name][1](value) for name, value in re.findall(r"([A-Z_]+)=([\d.]+)", alternative)
        }
        if changes:
            remedies.append(with_work(config, **changes))
    return remedies


def test_advice_raises_a_fraction_too_small_for_a_request() -> None:
    config = with_work(llama(), isl=20000, osl=2000, kv_fraction=0.01, max_batch_size=64)
    assert serving_capacity.advice(config, 101 * GIB) == (
        "one request of 20000+2000 tokens needs 1.34 GiB of cache, KV_CACHE_FRACTION=0.01 of the 100 GiB left by a "
        "step of 8192 tokens is 1 GiB; KV_CACHE_FRACTION=0.02 would do"
    )


@pytest.mark.parametrize(
    ("changes", "free_gib", "reduced", "least"),
    [
        ({"max_num_tokens": 100_000, "max_batch_size": 64}, 5, "max_num_tokens", 8193),  # too large a step
        ({"max_batch_size": 8192, "concurrency": 8192}, 4, "max_batch_size", 1),  # too large logits
    ],
)
def test_advice_reduces_what_is_too_large(changes: dict[str, int], free_gib: float, reduced: str, least: int) -> None:
    config = with_work(llama(), **changes)
    assert serving_capacity.cache_capacity(config, free_gib * GIB).missing > 0
    (smaller,) = advised(config, free_gib * GIB)
    assert least <= getattr(smaller.workload, reduced) < changes[reduced]
    assert serving_capacity.cache_capacity(smaller, free_gib * GIB).requests >= 1


def test_advice_reduces_a_batch_larger_than_the_cache() -> None:
    config = with_work(llama(), max_batch_size=4096, concurrency=4096, max_num_tokens=8192)
    capacity = serving_capacity.cache_capacity(config, 60 * GIB)
    assert serving_capacity.advice(config, 60 * GIB).endswith(
        f"MAX_BATCH_SIZE={capacity.requests} or more GPUs would do"
    )


def test_advice_without_a_remedy() -> None:
    assert serving_capacity.advice(llama(), 0.1 * GIB).endswith("; use more GPUs or a smaller dtype")
    assert "; use requests of at most " in serving_capacity.advice(
        with_work(llama(), isl=500_000, max_batch_size=1), 10 * GIB
    )
    assert serving_capacity.advice(llama(), 150 * GIB).startswith("fits: ")


def test_run_that_cannot_hold_one_request_is_rejected() -> None:
    long = llama(use_case="long", isl="100000", osl="2000", kv_fraction="0.01")
    line = serving_capacity.misfit(long) or ""
    assert re.match(r"one request of 100000\+2000 .* KV_CACHE_FRACTION=0\.\d\d would do", line)
    too_large = replace(llama("bf16", 2, "70b"), machine=replace(llama().machine, gpu="h100"))
    too_large = replace(too_large, parallel=replace(too_large.parallel, tp=1))
    assert "the weights of Llama-3.1-70B in bf16 need 131 GiB a GPU" in (serving_capacity.misfit(too_large) or "")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    free=st.floats(0.05, 200),
    fraction=st.floats(0.001, 1.0),
    isl=st.integers(1, 100_000),
    osl=st.integers(1, 20_000),
    batch=st.integers(1, 4096),
    tokens=st.integers(4096, 100_000),
)
def test_advice_is_one_line_and_its_remedies_work(free, fraction, isl, osl, batch, tokens) -> None:
    config = with_work(
        llama(), isl=isl, osl=osl, kv_fraction=fraction, max_batch_size=batch, max_num_tokens=tokens, concurrency=batch
    )
    message = serving_capacity.advice(config, free * GIB)
    assert "\n" not in message
    for remedied in advised(config, free * GIB):
        assert serving_capacity.cache_capacity(remedied, free * GIB).requests > 0
