"""Resolving a recipe row to a RunConfig: every row resolves, overrides are recorded, errors are one line."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_requests import ALL, overrides

from llmb.config.model import DeltaNetConfig
from llmb.config.native.departures import departures
from llmb.config.overrides import Setting, from_arguments, from_environment, split_environment
from llmb.config.parallel_layout import check_model
from llmb.config.recipe import expand_gpus, per_gpus, selector_values
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.run_model import check_heads
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.memory_estimate import memory_estimate

SEARCHED = pytest.mark.nightly  # rows of out-of-core training search a plan, for seconds each
ROWS = [
    pytest.param(recipe, row, dtype, gpus, proxy, marks=[SEARCHED] if recipe.kind == "outofcore" and not proxy else [])
    for recipe in ALL.values()
    for proxy, rows in ((False, recipe.rows), (True, recipe.proxies))
    for row in rows
    for dtype in (row["dtype"] if isinstance(row["dtype"], list) else [row["dtype"]])
    for gpus in expand_gpus(row["gpus"])
]


def request(size="8b", dtype="fp8", gpus=8, gpu="h100", **more):
    return RunRequest(size=size, dtype=dtype, gpus=gpus, gpu=gpu, **more)


@pytest.mark.parametrize(("recipe", "row", "dtype", "gpus", "proxy"), ROWS)
def test_every_recipe_row_resolves_to_its_own_values(recipe, row, dtype, gpus, proxy):
    picks = overrides(**{k: row[k] for k in ("mode", "use_case", "seqlen") if k in row})
    if recipe.kind == "outofcore" and not proxy:  # fixed values shorten the search for a plan
        picks += overrides(gbs=1, seqs_per_round=1, chunk_tokens=min(row["seqlen"], 32768))
    proxy_kind = "small" if proxy else None
    for gpu in selector_values(row, "gpu"):
        row_request = RunRequest(size=row["size"], dtype=dtype, gpus=gpus, gpu=gpu, proxy=proxy_kind, settings=picks)
        config = resolve(recipe, row_request)
        assert config.recipe_row == row
        assert config.machine.gpu == (gpu or "cpu")
    assert config.machine.gpus == gpus == config.parallel.world_size
    assert bool(config.proxy) == proxy
    assert config.precision.dtype == dtype
    for cell in ("tp", "pp", "cp", "vp", "ep", "etp", "fsdp"):
        if cell in row:
            assert getattr(config.parallel, cell) == row[cell]
    if "dp" in row:
        assert config.parallel.dp == per_gpus(row["dp"], gpus, "dp")
    if "ga" in row:
        assert config.workload.ga == row["ga"]
    if "layers" in row:
        assert config.model.layers == row["layers"]


def test_overrides_record_the_replaced_values():
    config = resolve(ALL["pretrain_llama3.1"], request(settings=overrides(mbs="2", tp="2")))
    assert (config.parallel.tp, config.parallel.dp, config.workload.ga) == (2, 4, 16)
    assert [(o.field, o.replaced, o.value) for o in config.overrides] == [("mbs", 1, 2), ("tp", 1, 2)]


def test_scale_above_the_range_continues_weak_scaling():
    config = resolve(ALL["pretrain_llama3.1"], request(gpus=256))
    assert config.workload.gbs == 256 * 16
    assert "weak scaling" in config.overrides[0].source


def test_short_run_measures_its_second_half():
    config = resolve(ALL["pretrain_llama3.1"], request(settings=overrides(steps="10")))
    assert config.workload.window == (6, 10)


@pytest.mark.parametrize(
    ("workload", "settings", "window"),
    [
        ("pretrain_nemotronh", {"steps": "400"}, (11, 400)),
        ("pretrain_nemotronh", {"steps": "50"}, (11, 44)),  # as the recipe has it
        ("pretrain_nemotronh", {"steps": "40"}, (11, 40)),
        ("pretrain_nemotronh", {"steps": "20"}, (11, 20)),
        ("pretrain_nemotronh", {"steps": "12"}, (7, 12)),
        ("pretrain_nemotronh", {"steps": "400", "window": "50-60"}, (50, 60)),
        ("pretrain_nemotronh", {"steps": "400", "profile": "true"}, (11, 45)),  # steps 46-50 are profiled
    ],
)
def test_window_follows_the_number_of_steps(workload, settings, window):
    config = resolve(ALL[workload], request("56b", "fp8", 256, settings=overrides(**settings)))
    assert config.workload.window == window


def test_longer_proxy_measures_more_steps():
    longer = request("8b", "fp32", 1, gpu=None, proxy="small", settings=overrides(steps="400"))
    config = resolve(ALL["pretrain_llama3.1"], longer)
    assert config.workload.window == (11, 400)
    assert [o.source for o in config.overrides if o.field == "window"] == ["more steps"]


def test_changed_model_is_a_proxy_without_reference():
    config = resolve(ALL["pretrain_nemotronh"], request("56b", "fp8", 256))
    assert config.reference is not None
    assert config.reference.step_time_s == 15.892
    altered = resolve(ALL["pretrain_llama3.1"], request(settings=overrides(**{"model.layers": "2"})))
    assert (altered.model.layers, altered.proxy, altered.reference) == (2, "model.layers=2", None)


def test_changed_setting_drops_the_reference_but_more_steps_keep_it():
    grok = ALL["pretrain_grok1"]
    assert resolve(grok, request("314b", "bf16", 256, "gb200", settings=overrides(mbs="2"))).reference is None
    assert resolve(grok, request("314b", "bf16", 256, "gb200", settings=overrides(steps="60"))).reference is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "9b"}, "unknown size 8b 70b"),
        ({"dtype": "int8"}, "unknown dtype fp8"),
        ({"gpu": "b300"}, "unknown gpu choices are gb300 --force takes a row of another GPU for b300"),
        ({"gpus": 7}, "scale 7 is not listed 8, 16, 32"),
        ({"settings": overrides(tp="3")}, "tp 3 x pp 1 x cp 1 = 3 does not divide 8 GPUs tp could be 1, 2, 4, 8"),
        ({"settings": overrides(gbs="100")}, "gbs 100 is not a multiple of mbs 1 x dp 8 gbs could be 96 or 104"),
        ({"settings": overrides(paralel="3")}, "unknown field 'paralel'"),
        ({"settings": overrides(ep="2")}, "has no experts"),
        ({"settings": overrides(vp="2")}, "without pipeline parallelism"),
        ({"settings": overrides(mbs="two")}, "mbs: expected a whole number, got 'two'"),
        ({"settings": overrides(mbs="0")}, "mbs (--set): 0 is out of range at least 1"),
        ({"settings": overrides(cp="2", seqlen="8190")}, "seqlen 8190 is not a multiple of 2 x cp 2"),
        (
            {"settings": overrides(tp="8", seqlen="4100")},
            "seqlen 4100 is not a multiple of tp 8 = 8; seqlen could be 4096",
        ),
        ({"settings": overrides(pp="8", gbs="4")}, "pp 8 needs at least 8 micro-batches, a step has 4"),
        ({"settings": overrides(pp="4", vp="2", gbs="18")}, "vp 2 takes micro-batches in rounds of pp 4 has 9"),
        ({"gpus": 16, "settings": overrides(tp="16")}, "tp 16 does not divide the 8 key and value heads 1, 2, 4, 8"),
        ({"gpus": 8, "layout": "h100"}, "--layout has no effect here add --proxy"),
        ({"gpus": 8, "layout": "a100", "proxy": "small"}, "unknown layout of pretrain_llama3.1 8b 'a100' gb200"),
        ({"settings": overrides(recompute_layers="99")}, "more than the 32 layers"),
        ({"settings": overrides(gpu_metrics="true")}, "no effect without profiling"),
        ({"settings": overrides(profile="true", nccl_trace="true")}, "exclude each other"),
        ({"settings": overrides(profile="true", profile_start="4", profile_stop="4")}, "no step is profiled"),
        ({"settings": overrides(profile="true", profile_start="60", profile_stop="70")}, "the run ends with step 50"),
        ({"settings": overrides(window="40-60")}, "ends after the last step, 50"),
        ({"settings": overrides(dp="4")}, "dp follows from the other settings"),
        ({"settings": overrides(kv_fraction="0.5")}, "unknown field"),
        ({"settings": overrides(lr="nan")}, "out of range"),
        ({"settings": overrides(**{"model.layerz": "2"})}, "did you mean layers"),
        ({"settings": overrides(masters="bf16")}, "unknown field 'masters' (did you mean master_weights?)"),
        ({"settings": overrides(fast_sums="true")}, "(did you mean fp8_fast_accum?)"),
        ({"settings": overrides(keep_inputs="true")}, "(did you mean save_norm_outputs?)"),
        ({"settings": overrides(fp8_scaling="current")}, "(did you mean fp8_recipe?)"),
        (
            {"settings": overrides(fp8_recipe="current")},
            "unknown fp8_recipe of training: 'current' choices are: tensorwise_delayed, tensorwise_current, rowwise, "
            "blockwise",
        ),
        ({"settings": overrides(fp8_recipe="channelwise")}, "choices are: tensorwise_delayed, tensorwise_current"),
        ({"settings": overrides(**{"model.attention_cap": "30"})}, "(did you mean attn_logit_softcap?)"),
    ],
)
def test_invalid_request_gives_a_one_line_error(changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(ALL["pretrain_llama3.1"], request(**changes))
    text = str(caught.value)
    assert "\n" not in text
    for part in message.split("  "):
        assert all(word in text for word in part.split()), text


def test_layout_must_divide_experts_and_not_split_mamba_sequences():
    for workload, size, changes, message in (
        ("pretrain_grok1", "314b", {"ep": "16"}, "ep 16 does not divide 8 experts"),
        ("pretrain_grok1", "314b", {"model.experts": None}, "has no experts"),
        ("pretrain_llama3.1", "8b", {"ep": "3"}, "ep 3 and etp 1 have no effect: .* has no experts"),
        ("pretrain_nemotronh", "56b", {"cp": "2"}, "cp 2: a Mamba layer cannot split its sequence"),
        ("pretrain_nemotronh", "56b", {"tp": "16"}, "tp 16 does not divide the 8 key and value heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(ALL[workload], request(size, "fp8", 512, settings=overrides(**changes)))


@pytest.mark.parametrize(
    ("workload", "split", "change", "message"),
    [
        ("pretrain_grok1", {"etp": 4}, {"experts": {"ffn": 1026}}, "etp 4 does not divide the 1026 channels"),
        ("pretrain_grok1", {"tp": 4}, {"vocab": 1026}, "tp 4 does not divide the 1026 entries of the vocabulary"),
        ("pretrain_nemotronh", {"tp": 4}, {"mamba": {"groups": 6}}, "tp 4 does not divide the 6 Mamba groups"),
        ("pretrain_nemotronh", {"tp": 4}, {"ffn": 1026}, "channels of the MLP of Nemotron-H-56B; tp could be 1, 2$"),
        ("pretrain_llama3.1", {"tp": 3}, {}, "tp 3 does not divide the 128 heads of .*; tp could be 1, 2, 4, 8$"),
        ("pretrain_deepseek-v3", {"tp": 4}, {"experts": {"ffn": 1026}}, "the 1026 channels of the shared experts"),
        ("pretrain_grok1", {"pp": 16, "vp": 8}, {}, "pp 16 x vp 8 needs more layers than the 64"),
    ],
)  # fmt: skip
def test_layout_must_divide_the_model(workload, split, change, message):
    recipe = ALL[workload]
    with pytest.raises(ConfigError, match=message):
        check_model(Parallel(**split), recipe.model(recipe.default_size, change))


def test_proxy_takes_the_layout_of_its_gpu():
    llama = ALL["pretrain_llama3.1"]
    on_h100 = resolve(llama, request("405b", "fp8", 16, "h100", proxy="small"))
    assert (on_h100.machine.gpu, on_h100.parallel.pp) == ("h100", 2)
    on_h200 = resolve(llama, request("405b", "fp8", 16, "h200", proxy="small"))  # not in the table: the recipe's choice
    assert (on_h200.machine.gpu, on_h200.parallel.pp, on_h200.parallel.fsdp) == ("h200", 1, True)


def test_a_variable_of_nvidias_recipes_without_effect_here_is_refused():
    with pytest.raises(ConfigError, match=r"^FP8_RECIPE=mx has no effect here: unset it; --set fp8_recipe="):
        from_environment({"FP8_RECIPE": "mx"})
    with pytest.raises(ConfigError, match=r"^CONFIG_VARIANT=v1 has no effect here: unset it$"):
        from_environment({"CONFIG_VARIANT": "v1"})
    assert from_environment({"ENABLE_VBOOST": "false", "ENABLE_CHECKPOINT": "", "TP_COMM_OVERLAP": "False"}) == []
    settings, for_ranks = split_environment({"USE_CASE": "chat:64/32", "NCCL_DEBUG": "INFO"}, "--env")
    assert [(s.field, s.value, s.source) for s in settings] == [
        ("use_case", "chat", "--env USE_CASE"), ("isl", "64", "--env USE_CASE"), ("osl", "32", "--env USE_CASE"),
    ]  # fmt: skip
    assert for_ranks == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(ConfigError, match=r"^--env GPU_TYPE: a variable of ranks does not choose the row"):
        split_environment({"GPU_TYPE": "gb200"}, "--env")
    assert from_environment({"ET": "4"}) == [Setting(field="etp", value="4", source="environment ET")]


def test_environment_variable_without_effect_is_rejected():
    variables = tuple(from_environment({"MODE": "max_throughput"}))
    with pytest.raises(ConfigError, match="MODE is set but has no effect on pretrain_llama"):
        resolve(ALL["pretrain_llama3.1"], request(settings=variables))


def test_use_case_sets_lengths_and_time_limits_accept_slurm_format():
    variables = tuple(from_environment({"USE_CASE": "chat:64/32", "SBATCH_TIMELIMIT": "1:40:00", "STREAMING": "off"}))
    config = resolve(ALL["inference_deepseek-r1"], request("671b", "nvfp4", 4, "gb200", settings=variables))
    assert (config.workload.isl, config.workload.osl, config.workload.streaming) == (64, 32, False)
    assert config.limits.time_limit_s == 6000
    for bad in ("chat:64", "chat:a/b", "nap", "nap:0/2", "../nap:1/2"):
        with pytest.raises(ConfigError):
            resolve(
                ALL["inference_deepseek-r1"],
                request("671b", "nvfp4", 4, "gb200", settings=tuple(from_environment({"USE_CASE": bad}))),
            )


def test_set_accepts_section_prefixes_and_rejects_invalid_arguments():
    assert from_arguments(["parallel.tp=2"])[0].field == "tp"
    assert from_arguments(["model.layers=2"])[0].field == "model.layers"
    with pytest.raises(ConfigError, match="expected field=value"):
        from_arguments(["tp"])


field_names = st.sampled_from(
    ["tp", "pp", "cp", "ep", "etp", "vp", "mbs", "gbs", "seqlen", "steps", "window", "profile", "recompute_layers", "x"]
)
values = st.one_of(
    st.integers(-2, 4096).map(str), st.text(max_size=8), st.sampled_from(["none", "true", "1e9", "nan", "8-2"])
)


ANY_REQUEST = {
    "workload": st.sampled_from(sorted(ALL)),
    "gpus": st.integers(-1, 3000),
    "dtype": st.sampled_from(["fp8", "bf16", "fp32", "nvfp4", "?"]),
    "gpu": st.sampled_from([None, "h100", "gb200", "h200", "cpu", "b200", "tpu"]),
    "proxy": st.sampled_from([None, None, "small", "true-width"]),
    "force": st.booleans(),
    "pairs": st.lists(st.tuples(field_names, values), max_size=4),
}


def check_resolved_or_refused(workload, gpus, dtype, gpu, proxy, force, pairs):
    recipe = ALL[workload]
    set_fields = tuple(Setting(field=f, value=v, source="--set") for f, v in pairs)
    try:
        config = resolve(
            recipe,
            RunRequest(
                size=recipe.sizes[0], dtype=dtype, gpus=gpus, gpu=gpu, proxy=proxy, force=force, settings=set_fields
            ),
        )
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert config.parallel.world_size == config.machine.gpus == gpus
    if recipe.kind == "training":
        work = config.workload
        assert work.gbs == work.mbs * work.ga * config.parallel.dp
        assert 1 <= work.window[0] <= work.window[1] <= work.steps
    assert (config.proxy is None) == (not (proxy or gpu == "cpu"))


@pytest.mark.slow
@settings(max_examples=150)
@given(**ANY_REQUEST)
def test_any_request_gives_a_consistent_config_or_a_one_line_error(**fields):
    check_resolved_or_refused(**fields)


@pytest.mark.nightly
@settings(max_examples=4000)
@given(**ANY_REQUEST)
def test_more_requests_give_a_consistent_config_or_a_one_line_error(**fields):
    check_resolved_or_refused(**fields)


@given(st.integers(1, 4096), st.integers(0, 12))
def test_gpu_ranges_expand_by_doubling(first, doublings):
    counts = expand_gpus(f"{first}-{first * 2**doublings}")
    assert counts == [first * 2**i for i in range(doublings + 1)]


@pytest.mark.parametrize("cell", ["8-", "-8", "16-8", "a-b", None, True, 1.5, ["8"]])
def test_invalid_gpu_range_is_rejected(cell):
    with pytest.raises(ConfigError):
        expand_gpus(cell)


def test_gpu_that_is_not_in_the_table_borrows_a_row_and_is_never_compared():
    llama = ALL["pretrain_llama3.1"]
    listed = resolve(llama, request(size="405b", gpus=128, gpu="gb200"))
    config = resolve(llama, request(size="405b", gpus=128, gpu="x100", gpu_memory_bytes=200 << 30))
    assert listed.reference is not None
    assert config.reference is None
    assert config.proxy is None
    assert (config.parallel, config.machine.gpu_memory_bytes) == (listed.parallel, 200 << 30)
    (departure,) = [o for o in config.overrides if o.field == "gpu"]
    assert (departure.value, departure.replaced) == ("x100", "gb200")
    assert departure.source == "no row for x100: the settings of gb200, the nearest in memory"
    (line,) = [line for line in departures(config) if "no row" in line]
    assert line.startswith("gpu=x100 instead of the recipe's gb200 (no row for x100")
    assert memory_estimate(config).device_budget == 200 << 30


@pytest.mark.parametrize(
    ("gib", "lender"), [(24, "h100"), (140, "h200"), (180, "b200"), (300, "gb300"), (None, "gb200")]
)
def test_borrowed_row_is_that_of_the_gpu_with_the_nearest_memory(gib, lender):
    memory = None if gib is None else gib << 30
    config = resolve(ALL["pretrain_llama3.1"], request(gpu="x100", gpu_memory_bytes=memory))
    (departure,) = [o for o in config.overrides if o.field == "gpu"]
    assert departure.replaced == lender
    assert ("not known" in departure.source) == (gib is None)


def test_listed_gpu_borrows_only_where_the_request_says_so():
    llama = ALL["pretrain_llama3.1"]
    with pytest.raises(ConfigError, match=r"choices are: .*; --force takes a row of another GPU for rtx-4090"):
        resolve(llama, request(gpu="rtx-4090"))
    config = resolve(llama, request(gpu="rtx-4090", borrow_row=True))
    assert ("gpu", "rtx-4090", "h100") in [(o.field, o.value, o.replaced) for o in config.overrides]


def test_recipe_may_have_rows_of_a_gpu_that_is_not_in_the_table():
    llama = ALL["pretrain_llama3.1"]
    row = {**llama.matching(size="8b", gpu="h100", gpus=8)[0], "gpu": "x100", "mbs": 1, "gbs": 8, "ga": 1}
    config = resolve(replace(llama, rows=(*llama.rows, row)), request(gpu="x100"))
    assert config.workload.gbs == 8
    assert "gpu" not in {o.field for o in config.overrides}


def test_force_takes_a_row_of_another_gpu():
    config = resolve(ALL["pretrain_llama3.1"], request(gpu="b300", force=True))
    assert ("gpu", "b300", "gb300") in [(o.field, o.value, o.replaced) for o in config.overrides]
    with pytest.raises(ConfigError, match="--force takes a row of another GPU for h200"):
        resolve(ALL["pretrain_llama3.1"], request("70b", gpus=64, gpu="h200"))
    config = resolve(ALL["pretrain_llama3.1"], request("70b", gpus=64, gpu="h200", force=True))  # rows of other sizes
    assert ("gpu", "h200") in [(o.field, o.value) for o in config.overrides]


@pytest.mark.parametrize("target", ALL)
def test_every_workload_has_a_proxy_on_a_gpu_that_is_not_in_the_table(target):
    recipe = ALL[target]
    row = recipe.proxies[0]
    config = resolve(
        recipe, request(selector_values(row, "size")[0], selector_values(row, "dtype")[0], 1, "rtx-4080", proxy="small")
    )
    assert (config.machine.gpu, config.machine.gpu_memory_bytes) == ("rtx-4080", None)
    assert memory_estimate(config).fits is None or config.workload.kind == "outofcore"


def test_blocks_that_are_predicted_only_do_not_run():
    model = ALL["inference_deepseek-r1"].model("671b")
    check_heads(model)
    delta_net = DeltaNetConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    for field, changes in {
        r"mla.q_rank=0 \(queries without a latent\)": {"mla": replace(model.mla, q_rank=0)},
        "experts.latent": {"experts": replace(model.experts, latent=1024)},
        "delta_net": {"delta_net": delta_net, "attention_pattern": "DDDF"},
        "output_gate": {"output_gate": True},
    }.items():
        with pytest.raises(ConfigError, match=f"the native engine has no {field}.*; predict it for another engine"):
            check_heads(replace(model, **changes))
