"""Default learning-rate schedule: peak by width and batch, warm-up and decay by steps; settings and resumes win."""

import pytest

from llmb.config.lr_schedule import REFERENCE_TOKENS, default_lr, fill_lr_steps
from llmb.config.overrides import Setting
from llmb.config.recipe import expand_gpus, load_all, selector_values, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import build, to_json
from llmb.config.spec import OutOfCore, Training
from llmb.errors import ConfigError
from llmb.report.config_summary import describe

ALL = load_all([shipped()])
PUBLISHED = {"8b": 3e-4, "70b": 1.5e-4, "405b": 8e-5}  # Llama 3, with batches of 4 to 16 million tokens


def resolved(gpu: str = "h200", size: str = "8b", workload: str = "pretrain_llama3.1", proxy=None, **settings):
    changes = tuple(Setting(field=k, value=str(v), source="--set") for k, v in settings.items())
    return resolve(ALL[workload], RunRequest(size=size, dtype="bf16", gpus=1, gpu=gpu, proxy=proxy, settings=changes))


def schedule(config) -> tuple:
    return config.workload.lr, config.workload.lr_warmup_steps, config.workload.lr_decay_steps


@pytest.mark.parametrize("size", PUBLISHED)
def test_peak_of_a_long_run_of_large_batches_is_the_published_one(size):
    model = ALL["pretrain_llama3.1"].model(size)
    assert default_lr(model, REFERENCE_TOKENS, 2000) == pytest.approx(PUBLISHED[size], rel=0.07)
    assert default_lr(model, 4 * REFERENCE_TOKENS, 8000) == default_lr(model, REFERENCE_TOKENS, 2000)


def test_peak_falls_with_the_square_root_of_batch_or_warmup_to_a_tenth():
    model = ALL["pretrain_llama3.1"].model("8b")
    by_batch = [default_lr(model, REFERENCE_TOKENS // part, 2000) / 3e-4 for part in (1, 4, 16, 100, 10_000)]
    assert by_batch == pytest.approx([1, 1 / 2, 1 / 4, 1 / 10, 1 / 10])
    by_warmup = [default_lr(model, REFERENCE_TOKENS, warmup) / 3e-4 for warmup in (2000, 500, 125, 10, 0)]
    assert by_warmup == pytest.approx([1, 1 / 2, 1 / 4, 1 / 10, 1 / 10])


def test_narrower_models_have_larger_peaks():
    peaks = [schedule(resolved(size=size))[0] for size in ("8b", "3b", "1b")]
    assert peaks == [3e-5, 4e-5, 6e-5]
    assert schedule(resolved(size="8b", proxy="small", gpu=None))[0] == 3e-4


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (2, 1), (7, 3), (20, 10), (40, 10), (50, 10), (400, 80), (5000, 1000), (10**6, 2000)]
)
def test_warmup_and_decay_follow_the_steps(steps, warmup):
    assert schedule(resolved(steps=steps))[1:] == (warmup, steps)


@pytest.mark.parametrize("workload", [name for name, recipe in ALL.items() if recipe.kind == "training"])
def test_every_row_warms_up_and_decays_within_its_run(workload):
    recipe = ALL[workload]
    for proxy, rows in ((None, recipe.rows), ("small", recipe.proxies)):
        for row in rows:
            dtype, gpus = selector_values(row, "dtype")[0], expand_gpus(row["gpus"])[0]
            gpu = selector_values(row, "gpu")[0]
            work = resolve(recipe, RunRequest(size=row["size"], dtype=dtype, gpus=gpus, gpu=gpu, proxy=proxy)).workload
            assert 0 < work.lr_warmup_steps < work.lr_decay_steps == work.steps
            assert 0 < work.lr <= 3e-3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr": 1e-3}, (1e-3, 10, 50)),
        ({"lr_warmup_steps": 0}, (3e-5, 0, 50)),
        ({"lr_warmup_steps": 100}, (5.3e-5, 100, None)),
        ({"lr_decay_steps": "none"}, (3e-5, 10, None)),
        ({"lr_decay_steps": 7}, (3e-5, 3, 7)),
        ({"lr_decay_steps": 2000}, (5.3e-5, 400, 2000)),
        ({"steps": 5000}, (5.3e-5, 1000, 5000)),
        ({"steps": 5000, "gbs": 64}, (1.1e-4, 1000, 5000)),
    ],
)
def test_settings_win_and_the_remaining_fields_follow(settings, expected):
    assert schedule(resolved(**settings)) == expected


@pytest.mark.parametrize("workload", ["pretrain_llama3.1", "outofcore_llama3"])
def test_a_decay_that_ends_in_warmup_is_refused_at_the_desk(workload):
    with pytest.raises(ConfigError, match="lr_decay_steps=10: must be more than lr_warmup_steps=10"):
        resolved(workload=workload, size="1b", lr_decay_steps=10, lr_warmup_steps=10)


def test_an_out_of_core_batch_is_that_of_its_plan():
    config = resolved(workload="outofcore_llama3", size="1b", proxy="small", gpu=None)
    tokens = config.workload.plan.gbs * config.workload.seqlen
    assert schedule(config) == (default_lr(config.model, tokens, 3), 3, 7)


@pytest.mark.parametrize("part", ["", "checkpoints"])
def test_a_resumed_run_keeps_its_schedule(tmp_path, part):
    first = resolved(steps=30)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(to_json(first))
    longer = resolved(steps=300, gbs=32, resume=tmp_path / part)
    assert schedule(longer) == schedule(first) == (3e-5, 10, 30)
    assert f"30 (the run in {tmp_path / part}" in describe(longer, "")
    assert schedule(resolved(steps=300, resume=tmp_path, lr_decay_steps=300)) == (3e-5, 10, 300)


@pytest.mark.parametrize("text", ["{}", "[]", '{"workload": []}', '{"workload": {"steps": 50}}'])
def test_a_resumed_run_of_an_older_version_keeps_what_it_meant(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert schedule(resolved(steps=300, resume=tmp_path)) == (3e-4, 10, None)
    (tmp_path / "config.json").unlink()
    assert schedule(resolved(steps=300, resume=tmp_path)) == (5.2e-5, 60, 300)


def test_an_older_config_file_means_what_it_meant():
    training = build(Training, {"seqlen": 8, "mbs": 1, "gbs": 1, "ga": 1})
    out_of_core = build(OutOfCore, {"seqlen": 8, "host_gib": 1.0, "device_gib": 1.0})
    for work in (training, out_of_core):
        assert (work.lr, work.lr_warmup_steps, work.lr_decay_steps) == (3e-4, 10, None)


def test_serving_has_no_schedule():
    values = {"isl": 8}
    fill_lr_steps(values)
    assert values == {"isl": 8}


def test_show_says_where_the_schedule_comes_from():
    page = describe(resolved(), "")
    assert "3e-05 (3e-04 at hidden size 4096, x 0.1 for batch and warm-up)" in page
    large = RunRequest(size="405b", dtype="fp8", gpus=128, gpu="gb200")
    page_405b = describe(resolve(ALL["pretrain_llama3.1"], large), "")
    assert "7.5e-06 (7.5e-05 at hidden size 16384, x 0.1 for batch and warm-up)" in page_405b
    assert "10 (by the 50 steps)" in page
    assert "50 (the last step)" in page
    changed = describe(resolved(lr=1e-5, lr_warmup_steps=60), "")
    assert "1e-05 (--set)" in changed
    assert "(the run ends in warm-up)" in changed


def test_a_changed_schedule_is_still_compared_with_published_results():
    changes = tuple(Setting(field=name, value="3", source="--set") for name in ("lr", "lr_warmup_steps"))
    request = RunRequest(size="405b", dtype="fp8", gpus=128, gpu="gb200", settings=changes)
    assert resolve(ALL["pretrain_llama3.1"], request).reference is not None
