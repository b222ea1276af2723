"""llmb-run gate: baseline files, limits, what is refused, exit codes."""

import json
import random

import pytest

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import to_json
from llmb.errors import ConfigError
from llmb.events import RequestDone, RunEnded, RunStarted, StepDone, append
from llmb.results.compare.baseline import Baseline, read_baseline
from llmb.results.compare.median_interval import MedianInterval


@pytest.fixture
def run(recipes, tmp_path):
    """Writes the run folder of a training run and returns it."""

    def make(seconds, seed=1, spread=0.002, gpu_name="this CPU", status="ok", **changes):
        overrides = tuple(Setting(field=k, value=v, source="--set") for k, v in changes.items())
        request = RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small", settings=overrides)
        config = resolve(recipes["pretrain_llama3.1"], request)
        chance, tokens = random.Random(seed), config.workload.gbs * config.workload.seqlen
        times = [seconds * (1 + spread * chance.gauss(0, 1)) for _ in range(config.workload.steps)]
        events = [RunStarted(time=1.0, gpu_name=gpu_name)]
        events += [StepDone(step=n, seconds=s, tokens=tokens) for n, s in enumerate(times, 1)]
        return write(tmp_path / f"run{len(list(tmp_path.iterdir()))}", config, [*events, RunEnded(status=status)])

    return make


def write(folder, config, events):
    folder.mkdir()
    (folder / "config.json").write_text(to_json(config))
    for event in events:
        append(folder / "events.rank0.jsonl", event)
    return folder


@pytest.fixture
def baseline(llmb_run, run, tmp_path):
    file = tmp_path / "baseline.json"
    assert llmb_run("gate", "--save", file, run(1.0))[0] == 0
    return file


@pytest.mark.parametrize(
    ("seconds", "spread", "limit", "code", "begin"),
    [
        (1.0, 0.002, "2%", 0, "ok: "),
        (1.05, 0.002, "2%", 1, "slower: "),
        (1.05, 0.002, "10%", 0, "ok: "),
        (0.9, 0.002, "0%", 0, "ok: "),
        (1.06, 0.1, "2%", 3, "undecided: "),
    ],
)
def test_a_run_is_judged_by_its_whole_interval(llmb_run, run, baseline, seconds, spread, limit, code, begin):
    measured = run(seconds, seed=2, spread=spread)
    exit_code, out, err = llmb_run("gate", "--baseline", baseline, "--max-slowdown", limit, measured)
    assert (exit_code, err) == (code, "")
    assert out.startswith(begin)
    assert out.count("\n") == 1
    verdict = json.loads(llmb_run("gate", "--baseline", baseline, "--max-slowdown", limit, measured, "--json")[1])
    assert begin.startswith(verdict["state"])
    assert verdict["low"] <= verdict["slowdown"] <= verdict["high"]


def test_another_time_limit_is_no_other_configuration(llmb_run, run, baseline):
    assert llmb_run("gate", "--baseline", baseline, run(1.0, seed=2, time_limit_s="99"))[0] == 0


def test_the_baseline_is_small_and_has_what_it_is_of(baseline):
    assert baseline.stat().st_size < 8000
    data = json.loads(baseline.read_text())
    assert (data["gpu_name"], data["runs"], list(data["times"])) == ("this CPU", 1, ["tokens_per_s"])
    assert len(data["samples_sha256"]) == 64
    assert data["settings"]["workload.gbs"] == 4


def test_repeats_widen_the_interval_to_the_noise_between_runs(llmb_run, run, tmp_path):
    """Runs differ by 3 % although each one's steps hardly do: 3 % more is no regression."""
    file = tmp_path / "repeats.json"
    assert llmb_run("gate", "--save", file, run(1.0), run(1.03), run(0.97))[0] == 0
    code, out, _ = llmb_run("gate", "--baseline", file, run(1.03), run(1.05), run(1.0))
    assert (code, out.split(":")[0]) == (3, "undecided")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gbs": "8"}, "the baseline is of another configuration: workload.ga is"),
        ({"gpu_name": "other CPU"}, "the baseline is of other hardware: 1 x this CPU, the run is on 1 x other CPU"),
        ({"status": "failed"}, "is failed: only a complete run can be judged"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(llmb_run, run, baseline, changes, message):
    code, out, err = llmb_run("gate", "--baseline", baseline, run(1.0, **changes))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-slowdown", "2"], "expected a percentage such as 2%"),
        (["--figure", "ttft_ms"], "the baseline has no ttft_ms; it has: tokens_per_s"),
    ],
)
def test_wrong_requests_name_the_mistake(llmb_run, run, baseline, arguments, message):
    code, _, err = llmb_run("gate", "--baseline", baseline, *arguments, run(1.0))
    assert (code, message in err) == (1, True)


def test_a_damaged_baseline_is_named(llmb_run, run, tmp_path):
    (tmp_path / "bad.json").write_text('{"nme": 1}')
    code, _, err = llmb_run("gate", "--baseline", tmp_path / "bad.json", run(1.0))
    assert (code, "unknown field" in err) == (1, True)


def test_serving_is_gated_by_output_tokens_or_a_latency(llmb_run, recipes, tmp_path):
    settings = tuple(
        Setting(field=k, value=v, source="--set") for k, v in (("num_requests", "160"), ("concurrency", "1"))
    )
    request = RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small", settings=settings)
    config = resolve(recipes["inference_llama3.1"], request)

    def load(name, speed, seed):
        chance, clock, events = random.Random(seed), 0.0, []
        for n in range(160):
            first = clock + 0.1 * chance.uniform(0.99, 1.01)
            end = first + 0.3 / speed * chance.uniform(0.99, 1.01)
            events.append(
                RequestDone(
                    request=n, arrival=clock, first_token=first, end=end, input_tokens=64, output_tokens=64,
                    requested_tokens=64,
                )
            )  # fmt: skip
            clock = end
        return write(tmp_path / name, config, [*events, RunEnded(status="ok")])

    file = tmp_path / "serving.json"
    assert llmb_run("gate", "--save", file, load("a", 1.0, 1))[0] == 0
    slower = load("b", 0.8, 2)
    assert llmb_run("gate", "--baseline", file, slower)[0] == 1
    assert llmb_run("gate", "--baseline", file, "--figure", "ttft_ms", slower)[0] == 0
    more = load("c", 0.81, 3)
    out = llmb_run("compare", tmp_path / "a", f"{slower},{more}")[1]
    assert "Student's distribution over repeats" in out
    assert "B generates" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": {}}, "holds no times"),
        ({"times": {"tokens_per_s": {"median": 0.0, "low": None, "high": None, "n": 1, "block": 1, "blocks": 1}}}, "0"),
    ],
)
def test_damaged_baseline_is_named(tmp_path, change, message):
    baseline = Baseline(
        name="run", gpu_name=None, gpus=1, commit=None, samples_sha256="", settings={},
        times={"tokens_per_s": MedianInterval(median=1.0, low=None, high=None, n=1, block=1, blocks=1)},
    )  # fmt: skip
    path = tmp_path / "baseline.json"
    path.write_text(to_json(baseline))
    assert read_baseline(path) == baseline
    path.write_text(json.dumps(json.loads(to_json(baseline)) | change))
    with pytest.raises(ConfigError, match=message):
        read_baseline(path)
