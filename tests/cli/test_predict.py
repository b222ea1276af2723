"""`llmb-run predict`: recipes, any model, files of rows, what-if, and refusals in one line."""

import json
from dataclasses import replace

import pytest

from llmb.config.serialization import to_json
from llmb.perfmodel.offload.machine_rates import H200, rates_path

MODEL = ["predict", "--model", "llama3.1-8b", "--gpu-type", "h100", "--scale", "8", "--set", "gbs=128"]
KEYS = {
    "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "memory_gib", "interval_80", "terms",
}  # fmt: skip


def test_a_recipe_row_prints_its_waterfall(llmb_run):
    code, out, err = llmb_run("predict", "-w", "pretrain_grok1", "-s", "314b", "--dtype", "fp8", "--scale", "512",
                              "--gpu-type", "h100")  # fmt: skip
    assert (code, err) == (0, "")
    for text in ("model FLOPs at peak", "GEMM", "expert all-to-all", "pipeline bubble", "80 % interval", "MFU"):
        assert text in out
    assert "does not fit" not in out
    _, out, _ = llmb_run("predict", "--model", "llama3.1-70b", "--gpu-type", "h100", "--scale", "8")
    assert "of 79 GiB: does not fit; `llmb-run tune` finds layouts that do" in out


def test_a_published_row_is_predicted_without_departures_of_the_native_engine(llmb_run):
    """Grok-1 on 512 H100 takes 13.43 s; the native engine would recompute two layers of each stage to fit."""
    row = ["predict", "-w", "pretrain_grok1", "--dtype", "fp8", "--scale", "512", "--gpu-type", "h100", "--json"]
    published, native = (json.loads(llmb_run(*row, *more)[1]) for more in ([], ["--set", "engine=native"]))
    assert published["interval_80"][0] < 13.43 < published["interval_80"][1]
    assert (published["terms"]["recompute"], published["engine"]) == (0, "megatron-bridge")
    assert native["terms"]["recompute"] > 0


def test_a_printed_cell_that_the_published_run_did_not_have_is_left_out_and_named(llmb_run):
    row = ["predict", "-w", "pretrain_llama3.1", "-s", "70b", "--gpu-type", "h100", "--scale", "64", "--json"]
    _, out, err = llmb_run(*row)
    assert err == "note: recompute_layers=0, as its release configures it; the printed table has 5\n"
    assert pytest.approx(json.loads(out)["step_time_s"], rel=0.08) == 9.86  # seconds, published by NeMo 25.04
    _, out, err = llmb_run(*row, "--set", "recompute_layers=5")
    assert (json.loads(out)["terms"]["recompute"] > 0, err) == (True, "")


def test_an_engine_has_its_constants_on_a_recipe_row(llmb_run):
    row = ["predict", "-w", "pretrain_grok1", "--scale", "512", "--gpu-type", "h100", "--json"]
    engines = ("megatron-2024", "megatron-bridge-2026")
    times = [json.loads(llmb_run(*row, "--set", f"engine={engine}")[1])["step_time_s"] for engine in engines]
    assert times[0] != times[1]
    _, _, err = llmb_run(*row, "--set", "engine=vllm")
    assert "choices are: megatron" in err


def test_a_row_made_for_the_native_engine_is_predicted_with_its_constants(llmb_run):
    row = ["predict", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--gpu-type", "h200", "--scale", "1"]
    assert json.loads(llmb_run(*row, "--json")[1])["engine"] == "native"


def test_json_carries_every_figure(llmb_run):
    code, out, _ = llmb_run(*MODEL, "--json")
    data = json.loads(out)
    assert code == 0
    assert data.keys() >= KEYS
    assert sum(data["terms"].values()) == pytest.approx(data["step_time_s"])
    assert data["tokens_per_s_per_gpu"] == pytest.approx(128 * 4096 / data["step_time_s"] / 8)


def test_what_if_stands_beside_what_is(llmb_run):
    code, out, _ = llmb_run(*MODEL, "--what-if", "gpu.hbm_bw=2x,network=0.5x")
    assert code == 0
    assert "without the what-if changes" in out


def test_rows_of_a_file_come_back_in_order_with_reasons(llmb_run, tmp_path):
    path = tmp_path / "rows.csv"
    header = "model,size,gpu,dtype,gpus,seqlen,gbs,mbs,tp,pp,cp"
    path.write_text(f"{header}\nllama3.1,8b,h100,bf16,8,8192,128,1,1,1,2\nnobody,1b,h100,bf16,8,8192,128,1,1,1,1\n")
    code, out, _ = llmb_run("predict", "--rows", str(path), "--json")
    good, bad = json.loads(out)
    assert code == 0
    assert good["row"] == 2
    assert good.keys() >= KEYS
    assert bad == {"row": 3, "error": "unknown model 'nobody-1b'"}
    code, out, err = llmb_run("predict", "--rows", str(path))
    assert code == 0
    assert "Llama-3.1-8B" in out
    assert err == "row 3: unknown model 'nobody-1b'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict"], "name the run with one of -w"),
        (["predict", "--model", "nobody", "--gpu-type", "h100", "--scale", "8"], "choices are: deepseek-v3-671b"),
        (["predict", "--model", "llama3.1-8b", "--scale", "8"], "--model needs --gpu-type (a100, a100-40gb"),
        (["predict", "--model", "llama3.1-8b", "--gpu-type", "h900", "--scale", "8"], "did you mean h"),
        ([*MODEL, "--set", "tpp=2"], "did you mean tp?"),
        ([*MODEL, "--set", "tp=16"], "tp x pp x cp = 16 does not divide 8 GPUs; use a multiple of 16"),
        ([*MODEL, "--set", "tp=-1"], "tp must be a whole number, 1 or more, got '-1'"),
        ([*MODEL, "--set", "engine=vllm"], "choices are: megatron"),
        ([*MODEL, "--dtype", "int4"], "choices are: bf16, fp8, fp8-row, fp8-block, fp8-mx, nvfp4"),
        ([*MODEL, "--what-if", "gpu.speed=2x"], "choices are: gpu.hbm_bw"),
        ([*MODEL, "--what-if", "network=fast"], "expected a factor such as 2x"),
        ([*MODEL, "--task", "sing"], "choices are: train, serve"),
        (["predict", "--model", "no/config.json", "--gpu-type", "h100", "--scale", "8"], "no such file"),
        (["predict", "--rows", "no.csv"], "cannot read no.csv"),
        (["predict", "-w", "pretrain_nobody", "--scale", "8"], "choices are:"),
        (["predict", "-w", "pretrain_grok1", "--gpu-type", "h100", "--scale", "48"], "multiple of 64"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_line_with_the_choices(llmb_run, arguments, message):
    code, out, err = llmb_run(*arguments)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b"\xff\xfe\x00", "is not a CSV file"),
    ],
)
def test_a_file_without_rows_is_one_line(llmb_run, tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    code, out, err = llmb_run("predict", "--rows", path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


@pytest.mark.parametrize(("column", "text"), [("step_time_s", "abc"), ("step_time_s", "0"), ("recompute_layers", "x")])
def test_a_wrong_cell_is_named(llmb_run, tmp_path, column, text):
    path = tmp_path / "rows.csv"
    path.write_text(f"model,gpu,dtype,gpus,seqlen,mbs,tp,{column}\nllama3.1-8b,h100,bf16,8,8192,1,1,{text}\n")
    code, _, err = llmb_run("predict", "--rows", path)
    assert code == 1
    assert err.startswith(f"row 2: {column} must be ")


def test_share_of_the_peak_follows_a_changed_peak(llmb_run):
    row = ("predict", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "8", "--gpu-type", "h100")
    _, out, _ = llmb_run(*row, "--what-if", "gpu.flops=2x")
    at_peak = next(line.split() for line in out.splitlines() if line.startswith("model FLOPs at peak"))
    assert f"MFU {at_peak[-1]} %" in out


def test_energy_cost_and_days_of_a_whole_training_run(llmb_run):
    prices = ["--tokens", "15e12", "--gpu-cost-per-hour", "2", "--cost-per-kwh", "0.1"]
    prediction = json.loads(llmb_run(*MODEL, *prices, "--json")[1])
    energy, rate = prediction["energy"], 8 * prediction["tokens_per_s_per_gpu"]
    assert energy["watts_per_gpu"] == 700
    assert energy["joules_per_million_tokens"] == pytest.approx(8 * 700 / rate * 1e6)
    assert energy["days_to_train"] == pytest.approx(15e12 / rate / 86400)
    hours = energy["days_to_train"] * 24
    assert energy["cost_to_train"] == pytest.approx(8 * 2 * hours + energy["kwh_to_train"] * 0.1)
    assert energy["kwh_to_train"] == pytest.approx(8 * 0.7 * hours)
    assert "1.5e+13 tokens: " in llmb_run(*MODEL, *prices)[1]


@pytest.mark.parametrize("engine", ["megatron-bridge", "native"])
def test_a_lower_power_limit_is_slower_and_takes_less_energy(llmb_run, engine):
    run = [*MODEL, "--set", f"engine={engine}", "--json"]
    full, limited = (json.loads(llmb_run(*run, *watts)[1]) for watts in ([], ["--watts", "500"]))
    assert limited["step_time_s"] > full["step_time_s"]
    assert limited["energy"]["joules_per_million_tokens"] < full["energy"]["joules_per_million_tokens"]


def test_a_price_must_be_above_zero(llmb_run):
    code, _, err = llmb_run(*MODEL, "--watts", "-5")
    assert (code, err) == (1, "ERROR: --watts must be a number above 0, got -5\n")


def test_rates_that_the_probe_measured_scale_the_native_engine_only(llmb_run, tmp_path):
    row = ["predict", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--gpu-type", "h200", "--scale", "1"]
    commands = ([*row, "--set", "engine=megatron-bridge", "--json"], [*row, "--json"])
    before = [json.loads(llmb_run(*command)[1])["step_time_s"] for command in commands]
    path = rates_path(tmp_path / "llmb", "h200")
    path.parent.mkdir(parents=True)
    path.write_text(to_json(replace(H200, matmul_tflops=H200.matmul_tflops / 2, memory_gbs=H200.memory_gbs / 2)))
    other, native = [json.loads(llmb_run(*command)[1])["step_time_s"] for command in commands]
    assert other == before[0]
    assert 1.8 * before[1] < native < 2.2 * before[1]


def test_rows_take_a_config_file_and_the_fields_of_set(llmb_run, tmp_path):
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 14336, "vocab_size": 128256, "model_type": "Other"}  # fmt: skip
    (tmp_path / "My-Model.json").write_text(json.dumps(shape))
    path = tmp_path / "rows.csv"
    path.write_text(
        "model,gpu,dtype,gpus,seqlen,gbs,mbs,tp,engine,recompute\n"
        f"{tmp_path}/My-Model.json,h100,bf16,8,8192,128,1,1,torchtitan,full\n"
        "meta-llama/Llama-3.1-8B-Instruct,h100,bf16,8,8192,128,1,1,torchtitan,none\n"
        "llama3.1-8b,h100,bf16,8,8192,128,1,1,torch,\n"
    )
    code, out, _ = llmb_run("predict", "--rows", path, "--json")
    file, name, wrong = json.loads(out)
    assert code == 0
    assert file["engine"] == name["engine"] == "torchtitan"
    assert file["tflops_per_gpu"] * file["step_time_s"] == pytest.approx(name["tflops_per_gpu"] * name["step_time_s"])
    assert file["terms"]["recompute"] > name["terms"]["recompute"] == 0
    assert wrong["error"].startswith("unknown value of engine 'torch'")


def test_a_row_of_a_gpu_without_a_known_network_leaves_the_others(llmb_run, tmp_path):
    path = tmp_path / "rows.csv"
    rows = "".join(f"llama3.1-8b,h20,bf16,{gpus},8192,128,1,1,red\n" for gpus in (8, 64))
    path.write_text("model,gpu,dtype,gpus,seqlen,gbs,mbs,tp,colour\n" + rows)
    code, out, err = llmb_run("predict", "--rows", path, "--json")
    first, second = json.loads(out)
    assert (code, first["gpus"]) == (0, 8)
    assert "network between link domains" in second["error"]
    assert err.startswith("columns that are not used: colour; columns are: source, model")


def test_an_engine_that_nobody_named_is_named_beside_our_own(llmb_run):
    """`show --model` and `submit --model` run the native engine: its time is the other of the two figures."""
    unnamed = llmb_run(*MODEL)[1].splitlines()
    assert unnamed[-1].startswith("engine megatron-bridge, as none is named")
    for option in (["--engine", "native"], ["--set", "engine=native"]):
        time = json.loads(llmb_run(*MODEL, *option, "--json")[1])["step_time_s"]
        assert f"run engine native (--engine native): {time:.3f} s on 8 GPUs" in unnamed[-1]
        assert "as none is named" not in llmb_run(*MODEL, *option)[1]
    assert "as none is named" not in llmb_run(*MODEL, "--engine", "megatron_bridge")[1]
    assert json.loads(llmb_run(*MODEL, "--json")[1])["engine"] == "megatron-bridge"


@pytest.mark.parametrize(
    "row", [("pretrain_grok1", "314b", "512", "h100"), ("pretrain_llama3.1", "405b", "128", "gb200")]
)
def test_a_row_is_predicted_beside_the_run_that_show_describes(llmb_run, row):
    """The native engine recomputes layers of Grok-1 on H100 that the published run did not."""
    workload, size, scale, gpu = row
    options = ["-w", workload, "-s", size, "--dtype", "fp8", "--scale", scale, "--gpu-type", gpu]
    last = llmb_run("predict", *options)[1].splitlines()[-1]
    assert last.startswith("engine megatron-bridge, which published the row; `show` and `submit` run engine native")
    seconds = float(last.rpartition("(--engine native): ")[2].split()[0])
    prediction = next(line for line in llmb_run("show", *options)[1].splitlines() if "predicted step time" in line)
    assert float(prediction.split()[3]) == pytest.approx(seconds, rel=1e-3)
    assert prediction.endswith("by constants of engine native")
    assert "published the row" not in llmb_run("predict", *options, "--engine", "native")[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--engine", "native", "--set", "engine=jax"], "both name the engine"),
        (["--engine", "vllm"], "choices are: megatron"),
    ],
)
def test_engines_that_cannot_be_meant_are_refused(llmb_run, more, message):
    code, out, err = llmb_run(*MODEL, *more)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


@pytest.mark.parametrize("task", ["train", "serve"])
@pytest.mark.parametrize(
    "option", [["--engine", "native"], ["--set", "tp=2"], ["--isl", "5"], ["--gpu-type", "h100"], ["--watts", "500"]]
)
def test_a_file_of_rows_takes_no_option_that_describes_one_run(llmb_run, tmp_path, task, option):
    path = tmp_path / "rows.csv"
    path.write_text("model,gpu,dtype,gpus,seqlen,gbs,mbs,tp\nllama3.1-8b,h100,bf16,8,4096,8,1,1\n")
    code, out, err = llmb_run("predict", "--rows", path, "--task", task, *option)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"{option[0]} has no effect with --rows" in err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cp=64", "seqlen=32"], "cp 64 does not divide sequences of 32 tokens"),
        (["tp=3"], "tp 3 does not divide 32 attention heads; possible: "),
        (["recompute_layers=99"], "recompute_layers 99: at most 32 of the 32 layers"),
        (["recompute=full", "offload_layers=1"], "offload_layers 1: at most 0 of the 32 layers"),
        (["recompute=selective", "recompute_layers=2"], "recompute_layers has no effect with recompute=selective"),
        (["dispatcher=deepep"], "dispatcher has no effect: Llama-3.1-8B has no experts"),
        (["etp=2"], "etp 2 has no effect: Llama-3.1-8B has no experts"),
        (["vp=4"], "vp 4 has no effect without pipeline stages"),
    ],
)
def test_settings_that_are_impossible_or_change_nothing_are_refused(llmb_run, settings, message):
    model = ["predict", "--model", "llama3.1-8b", "--gpu-type", "h100", "--scale", "64"]
    code, out, err = llmb_run(*model, *(part for text in settings for part in ("--set", text)))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


def test_an_expert_split_that_is_impossible_names_the_possible_ones(llmb_run):
    model = ["predict", "--model", "mixtral-8x7b", "--gpu-type", "h100", "--scale", "64", "--set", "ep=16"]
    assert "ep 16 does not divide 8 experts; possible: [2, 4, 8]" in llmb_run(*model)[2]


@pytest.mark.parametrize(
    "task", [["--scale", "24"], ["--task", "serve", "--isl", "8", "--osl", "8", "--concurrency", "1"]]
)
@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        (
            "nemotron4-15b",
            3,
            "tp 3 does not divide 8 key and value heads, nor is it a multiple of them; possible: [1, 2, ",
        ),
        ("llama2-13b", 5, "tp 5 does not divide 13824 channels of the MLP; possible: [1, 2, 4, 8]"),
        ("deepseek-v3-671b", 12, "tp 12 does not divide 128 attention heads; possible: [1, 2, 4, 8, 16, "),
    ],
)
def test_a_tp_that_no_engine_can_have_names_the_possible_ones(llmb_run, task, model, tp, message):
    code, out, err = llmb_run("predict", "--model", model, "--gpu-type", "b200", *task, "--set", f"tp={tp}")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


@pytest.mark.parametrize("command", ["predict", "show", "tune"])
def test_a_workload_with_proxies_only_says_so(llmb_run, command):
    code, out, err = llmb_run(command, "-w", "pretrain_deepseek-v3")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "pretrain_deepseek-v3 has no recipe rows, only proxies" in err


def test_an_out_of_core_run_is_sent_to_its_plan(llmb_run):
    row = ["-w", "outofcore_llama3", "-s", "8b", "--gpu-type", "h200"]
    assert "is not predicted as a training step; its plan has its time" in llmb_run("predict", *row)[2]
    assert "llmb-run plan searches its plan" in llmb_run("tune", *row)[2]


def test_json_tells_whether_a_layout_fits(llmb_run, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("model,size,gpu,dtype,gpus,mbs,fsdp,seqlen\nllama3.1,70b,h100,bf16,8,1,true,4096\n")
    for arguments in (["--model", "llama3.1-70b", "--gpu-type", "h100", "--scale", "8"], ["--rows", str(rows)]):
        data = json.loads(llmb_run("predict", *arguments, "--json")[1])
        data = data[0] if isinstance(data, list) else data
        assert data["gpu_memory_gib"] == pytest.approx(79.1, abs=0.2)
        assert data["memory_gib"] > data["gpu_memory_gib"]


@pytest.mark.parametrize(
    ("variables", "more", "expected"),
    [
        ({"MODEL_SIZE": "8b", "DTYPE": "fp8", "JOB_TOTAL_GPUS": "8", "GPU_TYPE": "h100"}, [], (8, "fp8", 128, 1)),
        ({"MBS": "2"}, ["-s", "8b", "--dtype", "fp8", "--scale", "8", "--gpu-type", "h100"], (8, "fp8", 128, 2)),
    ],
)
def test_variables_of_the_recipes_choose_and_override_the_row_as_for_submit(
    llmb_run, monkeypatch, variables, more, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    data = json.loads(llmb_run("predict", "-w", "pretrain_llama3.1", *more, "--json")[1])
    assert (data["gpus"], data["dtype"], data["gbs"], data["mbs"]) == expected
    monkeypatch.setenv("DTYPE", "bf16")
    code, _, err = llmb_run("predict", "-w", "pretrain_llama3.1", "--dtype", "fp8")
    assert (code, err) == (1, "ERROR: --dtype fp8 and DTYPE=bf16 disagree; give one of them\n")


def test_a_mistake_in_what_if_is_not_one_of_the_rows(llmb_run, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("model,gpu,dtype,gpus,seqlen,gbs,mbs,tp\nllama3.1-8b,h100,bf16,8,4096,8,1,1\n")
    code, out, err = llmb_run("predict", "--rows", path, "--what-if", "gpu.speed=2x")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "unknown field of --what-if" in err


@pytest.mark.parametrize(("gpu", "possible"), [("h100-pcie", "at most 2 GPUs"), ("gh200", "at most one GPU")])
def test_gpus_without_a_known_network_say_how_many_can_be_predicted(llmb_run, gpu, possible):
    code, out, err = llmb_run("predict", "--model", "llama3.1-8b", "--gpu-type", gpu, "--scale", "8")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"{possible} can be predicted" in err
    last = llmb_run("predict", "--model", "llama3.1-8b", "--gpu-type", gpu, "--scale", "1")[1].splitlines()[-1]
    assert last.endswith(" s on 1 GPU with the same settings")


def test_engines_have_the_names_of_their_projects(llmb_run):
    engines = [json.loads(llmb_run(*MODEL, "--engine", name, "--json")[1])["engine"] for name in ("NeMo", "maxtext")]
    assert engines == ["megatron", "jax"]
    assert "choices are: megatron" in llmb_run(*MODEL, "--engine", "megatron-deepspeed")[2]


def test_sequences_beyond_the_context_are_named(llmb_run):
    long = ["predict", "--model", "llama2-7b", "--gpu-type", "h100", "--scale", "8", "--set", "seqlen=8192"]
    note = "8192 tokens are more than the 4096 of llama2-7b's context (max_position_embeddings)"
    assert json.loads(llmb_run(*long, "--json")[1])["note"].startswith(note)
    assert note in llmb_run(*long)[1]
    assert json.loads(llmb_run(*MODEL, "--json")[1])["note"] is None


def test_a_file_without_the_column_size_has_rows(llmb_run, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("model,gpu,dtype,gpus,seqlen,gbs,mbs,tp\nllama3.1-8b,h100,bf16,8,4096,128,1,1\n")
    (row,) = json.loads(llmb_run("predict", "--rows", path, "--json")[1])
    assert row["step_time_s"] == json.loads(llmb_run(*MODEL, "--json")[1])["step_time_s"]
