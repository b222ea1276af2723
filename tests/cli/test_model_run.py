"""`submit --model`: the recipe made from a config.json, its layout and batch, and refusals in one line."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from llmb.cli.llmb_run import parser
from llmb.cli.model_run.model_options import recipes_for
from llmb.cli.run_options import run_selection
from llmb.config.huggingface.hf_config import from_hf_config
from llmb.config.huggingface.model_recipe import model_size
from llmb.config.resolve import resolve
from llmb.config.run_list import tasks_for
from llmb.config.spec import Inference, OutOfCore, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.memory_fit import misfit

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
TINY = QWEN3_8B | {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip

UNREAD_WEIGHTS = (
    "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.safetensors.index.json", "consolidated.00.pth",
    "model.gguf", "adapter_model.safetensors",
)  # fmt: skip


def options_of(tmp_path: Path, config: dict[str, Any], *words: str) -> Namespace:
    folder = tmp_path / "my-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return parser().parse_args(["submit", "--model", str(folder), *words])


def run_of(tmp_path: Path, config: dict[str, Any], *words: str) -> RunConfig:
    return run_for(options_of(tmp_path, config, *words))


def run_for(options: Namespace) -> RunConfig:
    recipes = recipes_for(options)
    (task,) = tasks_for(run_selection(options), recipes)
    return resolve(recipes[task.workload], task.request)


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llmb.launch.local_machine.gpu_names", list)
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "install"))
    monkeypatch.chdir(tmp_path)


def test_a_layout_that_fits_is_chosen_and_settings_of_the_user_stay(tmp_path: Path) -> None:
    run = run_of(tmp_path, QWEN3_8B, "--gpu-type", "h200", "--scale", "2", "--set", "mbs=2", "--seqlen", "8192")
    assert isinstance(run.workload, Training)
    assert (run.target, run.size, run.precision.dtype) == ("train_my-model", "8.19b", "bf16")
    assert (run.workload.mbs, run.workload.seqlen, run.proxy) == (2, 8192, None)
    assert misfit(run) is None
    assert run.recipe_row["recompute_layers"] == run.workload.recompute_layers


def test_sizes_have_three_digits_and_no_exponent() -> None:
    """As Gemma 3 1B (999.9 million parameters) and Kimi K2 (1,026 billion) need it."""
    tied = TINY | {"num_hidden_layers": 1, "tie_word_embeddings": True, "hidden_size": 1000}
    sizes = {
        vocab: model_size(from_hf_config(tied | {"vocab_size": vocab}))
        for vocab in (1000, 134_000, 999_300, 999_499, 8_200_000, 1_026_000_000)
    }
    assert list(sizes.values()) == ["1.58m", "135m", "1b", "1b", "8.2b", "1030b"]


def test_as_many_requests_are_served_as_fit(tmp_path: Path) -> None:
    single, pair = (
        run_of(tmp_path, QWEN3_8B, "--task", "serve", "--gpu-type", "h100", "--scale", scale) for scale in "12"
    )
    assert isinstance(single.workload, Inference)
    assert isinstance(pair.workload, Inference)
    assert (single.parallel.tp, pair.parallel.tp) == (1, 2)
    assert 16 <= single.workload.max_batch_size < pair.workload.max_batch_size
    assert misfit(single) is None


def test_heads_that_all_gpus_do_not_divide_are_served_in_a_pipeline(tmp_path: Path) -> None:
    models = {
        "28 heads": QWEN3_8B | {"num_attention_heads": 28, "num_key_value_heads": 4},
        "10 kv heads": QWEN3_8B | {"num_attention_heads": 40, "num_key_value_heads": 10},
        "one norm of all heads": QWEN3_8B | {"model_type": "olmo2"},
        "8 kv heads": QWEN3_8B,
    }
    runs = {
        name: run_of(tmp_path, config, "--task", "serve", "--gpu-type", "h100", "--scale", "8")
        for name, config in models.items()
    }
    layouts = {name: (run.parallel.tp, run.parallel.pp) for name, run in runs.items()}
    assert layouts == {"28 heads": (4, 2), "10 kv heads": (2, 4), "one norm of all heads": (1, 8), "8 kv heads": (8, 1)}
    assert all(misfit(run) is None for run in runs.values())


def test_shards_of_experts_can_be_quantized(tmp_path: Path) -> None:
    """Whole groups of 32 values of a gpt-oss (2,880 wide), whole blocks of 128 of a Qwen3-30B-A3B (768 wide)."""
    gpt_oss = QWEN3_8B | {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "sliding_window": 128,
    }  # fmt: skip
    qwen3_moe = QWEN3_8B | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }  # fmt: skip
    layouts = {
        (config["model_type"], scale): (run.parallel.tp, run.parallel.ep)
        for config in (gpt_oss, qwen3_moe)
        for scale in ("2", "4", "8")
        for run in [run_of(tmp_path, config, "--task", "serve", "--gpu-type", "h100", "--scale", scale)]
    }
    assert layouts == {
        ("gpt_oss", "2"): (2, 1), ("gpt_oss", "4"): (4, 2), ("gpt_oss", "8"): (8, 4),
        ("qwen3_moe", "2"): (2, 1), ("qwen3_moe", "4"): (4, 2), ("qwen3_moe", "8"): (8, 4),
    }  # fmt: skip


def test_weights_that_are_stored_in_fp8_are_served_in_fp8_where_the_gpu_can(tmp_path: Path) -> None:
    stored = QWEN3_8B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    serve = ("--task", "serve", "--gpu-type")
    dtypes = {gpu: run_of(tmp_path, stored, *serve, gpu).precision.dtype for gpu in ("h100", "l4", "a10g", "cpu")}
    assert dtypes == {"h100": "fp8", "l4": "fp8", "a10g": "bf16", "cpu": "fp32"}
    assert run_of(tmp_path, stored, "--gpu-type", "h100").precision.dtype == "bf16"
    assert run_of(tmp_path, stored, *serve, "h100", "--dtype", "bf16").precision.dtype == "bf16"


def test_serving_and_out_of_core_training_take_the_weights_of_a_folder(tmp_path: Path) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    weights = lambda task, config: run_of(tmp_path, config, "--task", task).workload.weights  # noqa: E731
    assert [weights(task, TINY) for task in ("serve", "offload")] == [None, None]
    (tmp_path / "my-model" / "model.safetensors").write_bytes(b"")
    folder = str((tmp_path / "my-model").resolve())
    assert [weights(task, TINY) for task in ("serve", "offload")] == [folder, folder]
    assert weights("serve", TINY | fp8) == folder
    with pytest.raises(
        ConfigError, match="my-model holds weights in fp8, which only --task serve reads; give its config"
    ):
        weights("offload", TINY | fp8)
    assert [weights(task, QWEN3_8B) for task in ("serve", "offload")] == [None, None]  # a proxy


@pytest.mark.parametrize("task", ["train", "serve", "offload"])
def test_a_gpu_without_a_row_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    assert run_of(tmp_path, TINY, "--task", task, "--gpu-type", "unlisted:T4").machine.gpu == "t4"
    monkeypatch.setenv("GPU_TYPE", "unlisted:t4")
    assert run_of(tmp_path, TINY, "--task", task).machine.gpu == "t4"


@pytest.mark.parametrize("file", UNREAD_WEIGHTS)
@pytest.mark.parametrize("task", ["serve", "offload"])
def test_weights_that_cannot_be_read_are_not_replaced_by_random_ones(tmp_path: Path, task: str, file: str) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / file).write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"my-model holds {file}.*give its config.json alone for random weights"):
        run_of(tmp_path, TINY, "--task", task)
    config = str(tmp_path / "my-model" / "config.json")
    options = parser().parse_args(["submit", "--model", config, "--task", task])
    assert run_for(options).workload.weights is None


def test_a_small_model_runs_whole_on_a_cpu_and_a_large_one_as_a_proxy(tmp_path: Path) -> None:
    tiny, large = run_of(tmp_path, TINY), run_of(tmp_path, QWEN3_8B)
    assert (tiny.machine.gpu, tiny.model.layers, tiny.model.hidden, tiny.proxy) == ("cpu", 2, 64, None)
    assert (large.machine.gpu, large.model.qk_norm) == ("cpu", "head")
    assert large.proxy is not None
    pair = run_of(tmp_path, TINY, "--scale", "2")
    assert (pair.machine.gpus, pair.parallel.dp, pair.proxy) == (2, 2, None)
    assert run_of(tmp_path, TINY, "--task", "serve", "--scale", "2").proxy is None
    assert run_of(tmp_path, TINY, "--proxy").proxy is not None
    assert isinstance(run_of(tmp_path, TINY, "--task", "offload").workload, OutOfCore)


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (TINY, ("-w", "pretrain_grok1"), "--model names the model; leave out -w"),
        (TINY, ("--scale", "1,2"), "--model runs at one scale, got --scale 1,2"),
        (TINY | {"mlp_bias": True}, (), "mlp_bias=True is not supported"),
        ({"model_type": "gpt2"}, (), "unknown model_type of config.json: 'gpt2'; choices are: llama, qwen2"),
        (
            QWEN3_8B | {"num_hidden_layers": 400},
            ("--task", "serve", "--gpu-type", "h100"),
            r"leaves no room for the KV cache of one request on 1 x h100; use more GPUs \(--scale\), or --dtype fp8$",
        ),
        (
            QWEN3_8B | {"num_hidden_layers": 400},
            ("--task", "serve", "--gpu-type", "a10g"),
            r"leaves no room for the KV cache of one request on 1 x a10g; use more GPUs \(--scale\)$",
        ),
    ],
)
def test_refusals_name_the_mistake(
    tmp_path: Path, config: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path, config, *words)


def test_a_name_that_predictions_know_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, message in (("Qwen/Qwen3-8B", "predict and tune know this name"), ("qwen9-8b", "no such file")):
        with pytest.raises(ConfigError, match=message):
            recipes_for(parser().parse_args(["show", "--model", name]))


def test_a_task_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="--task serve says what to do with --model"):
        recipes_for(parser().parse_args(["show", "--task", "serve"]))


def test_sequences_beyond_the_context_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = QWEN3_8B | {"max_position_embeddings": 2048}
    run_of(tmp_path, short, "--gpu-type", "h100")
    assert "note: 4096 tokens are more than the 2048 of my-model's context" in capsys.readouterr().err
    run_of(tmp_path, short, "--gpu-type", "h100", "--seqlen", "2048")
    run_of(tmp_path, short, "--gpu-type", "h100", "--task", "serve", "--set", "isl=1024", "--set", "osl=1024")
    assert capsys.readouterr().err == ""
    run_of(tmp_path, short, "--gpu-type", "h100", "--task", "serve", "--set", "isl=1025", "--set", "osl=1024")
    assert "note: 2049 tokens" in capsys.readouterr().err
