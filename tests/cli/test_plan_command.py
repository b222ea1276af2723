"""`llmb-run plan`: the documented figures, invalid budgets, sequences that no chunk divides."""

import json
import re

import pytest

DOCUMENT = [
    "plan", "-w", "outofcore_llama3", "-s", "8b", "--seqlen", "65536", "--host-gb", "178", "--device-gb", "78",
]  # fmt: skip
# All choices fixed, so no search: these tests are about what is printed of a plan.
FIXED = [
    word
    for setting in (
        "chunk_tokens=16384", "seqs_per_round=1", "gbs=5", "resident_params=4", "resident_grads=38",
        "resident_states=0", "full_saves=73",
    )
    for word in ("--set", setting)
]  # fmt: skip
PROXY = ["plan", "-w", "outofcore_llama3", "-s", "8b", "--dtype", "bf16", "--proxy"]


@pytest.fixture
def document(llmb_run):
    code, out, err = llmb_run(*DOCUMENT, *FIXED, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.slow
def test_documented_plan_has_every_figure(document):
    cut = {"chunk_size": 16384, "chunks_per_round": 4, "seqs_per_round": 1, "rounds_per_step": 5, "seqs_per_step": 5}
    assert cut.items() <= document.items()
    assert document["global_batch_tokens"] == 5 * 65536
    on_device = document["activation_slots"] + document["light_slots"]
    assert document["host_activations"] == 32 * 4 - on_device
    saved = [document[name] for name in ("host_fully_saved", "host_inp_context_attn", "host_inp_context")]
    assert sum(saved) == document["host_activations"]
    assert document["published"].keys() <= document.keys()


def test_predicted_figures_are_consistent(document):
    assert document["tokens_per_s"] == pytest.approx(5 * 65536 / document["step_s"])
    assert 0 < document["mfu"] < document["hfu"] < 1
    assert 0 < document["recompute_share"] < 0.2
    assert document["compute_share"] <= 1
    assert document["bound"].startswith(("compute-bound", "link-bound", "latency-bound"))
    for side in ("host", "device"):
        assert 0 < sum(document[f"{side}_bytes"].values()) <= document[f"{side}_gib"] * 2**30
    assert "H200" in document["rates"]["source"]


def test_units_are_resident_or_at_home(document):
    places = {place["kind"]: place for place in document["places"]}
    for kind, resident in (("param", 4), ("grad", 38), ("state", 0)):
        assert places[kind]["resident"] == resident
        assert places[kind]["resident"] + places[kind]["at_home"] == document["units"] == 38
    assert places["rest"]["at_home"] == document["host_fully_saved"]


def test_tables_show_the_published_plan_beside_the_computed_one(llmb_run):
    code, out, err = llmb_run(*DOCUMENT, *FIXED)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["plan", "here", "published", "meaning"] in lines
    assert ["chunk", "size", "16,384", "16,384"] in [line[:4] for line in lines]
    assert ["seqs", "per", "round", "1", "1"] in [line[:5] for line in lines]
    for heading in ("buffers", "memory", "prediction of a step", "rates"):
        assert any(line.startswith(heading + "  ") for line in out.splitlines()), heading
    assert "-bound: " in out
    assert out.count("GiB of host and 78 GiB of device memory") == 1


@pytest.mark.slow
def test_another_gpu_type_has_its_rates_and_no_published_plan(llmb_run):
    code, out, _ = llmb_run(*DOCUMENT, *FIXED, "--gpu-type", "a100", "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["gpu"] == plan["rates"]["gpu"] == "a100"
    assert plan["published"] is None


@pytest.mark.slow
def test_last_chunk_of_a_prime_sequence_is_shorter(llmb_run):
    code, out, _ = llmb_run(*DOCUMENT, *FIXED, "--seqlen", "65537")
    assert code == 0
    assert "; the last of a sequence has 1" in out


def test_proxy_plan_has_no_times_on_an_unmeasured_cpu(llmb_run):
    code, out, err = llmb_run(*PROXY, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["step_s"] is plan["mfu"] is plan["bound"] is None
    assert (plan["chunks_per_round"], plan["rounds_per_step"]) == (4, 2)
    assert all(plan[name] > 0 for name in ("host_fully_saved", "host_inp_context_attn", "host_inp_context"))
    assert all(place["at_home"] > 0 for place in plan["places"] if place["resident"] is not None)
    code, out, _ = llmb_run(*PROXY)
    assert code == 0
    assert "`llmb-run probe` measures this machine" in out


def test_the_plan_of_a_folder_is_out_of_core(llmb_run, tmp_path):
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = llmb_run("plan", "--model", str(tmp_path / "config.json"), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["chunks_per_round"] > 0
    code, _, err = llmb_run("plan", "--model", str(tmp_path / "config.json"), "--task", "train")
    assert code == 1
    assert "plans are made for out-of-core runs" in err


def test_measured_rates_are_used_where_available(llmb_run, tmp_path):
    from llmb.config.serialization import to_json
    from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU, rates_path

    path = rates_path(tmp_path / "llmb", "cpu")
    path.parent.mkdir(parents=True)
    path.write_text(to_json(NOMINAL_CPU).replace("nominal", "measured on Monday"))
    code, out, _ = llmb_run(*PROXY, "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["step_s"] > 0
    assert plan["mfu"] is None  # a CPU has no published peak
    assert plan["rates"]["source"] == "measured on Monday"


def test_plan_beyond_this_machine_is_a_warning(llmb_run, monkeypatch):
    code, _, err = llmb_run(*PROXY, "--host-gb", "1000000")
    assert (code, err) == (0, "")  # the plan of a small model uses little of it
    monkeypatch.setattr("llmb.cli.memory_check.available_memory_bytes", lambda: 1 << 20)
    code, _, err = llmb_run(*PROXY)
    assert code == 0
    assert err.count("\n") == 1
    assert err.startswith("warning: the proxy of ")
    assert err.endswith("lower --host-gb or --device-gb\n")


def test_a_disk_is_shown_and_its_missing_folder_is_a_warning(llmb_run, tmp_path):
    small = [*PROXY, "--host-gb", "0.035", "--set", "disk_gib=1"]
    code, out, err = llmb_run(*small)
    assert code == 0
    assert err == "warning: the plan keeps 0.03 GiB on disk; name a folder there: --set disk_path=FOLDER\n"
    for text in ("1 GiB of disk", "on disk", "disk GiB", "staging buffers of the disk", "disk, read", "disk, written"):
        assert text in out
    assert llmb_run(*small, "--set", f"disk_path={tmp_path}")[2] == ""
    assert "disk" not in llmb_run(*PROXY)[1]


NOTHING_RESIDENT = [w for kind in ("params", "grads", "states") for w in ("--set", f"resident_{kind}=0")]
WRONG = [
    ([*DOCUMENT, "--host-gb", "0"], "host_gib (--host-gb): 0.0 is out of range; it must be more than 0"),
    ([*DOCUMENT, "--device-gb", "-3"], "device_gib (--device-gb): -3.0 is out of range; it must be more than 0"),
    ([*DOCUMENT, "--device-gb", "much"], "device_gib: expected a number, got 'much'"),
    ([*DOCUMENT, "--seqlen", "0"], "seqlen (--seqlen): 0 is out of range; it must be at least 1"),
    ([*DOCUMENT, "--set", "update=best"], "choices are: master, stochastic, nearest"),
    ([*DOCUMENT, "--set", "clip=0"], "clip (--set): 0.0 is out of range; it must be more than 0"),
    ([*DOCUMENT, "--set", "plan=mine"], "unknown field (--set) for outofcore_llama3: 'plan'"),
    ([*DOCUMENT, "--set", "pack=true"], "pack has no effect on synthetic tokens"),
    ([*DOCUMENT, "--set", "model.gated=false"], "out-of-core training does not compute gated=False"),
    ([*DOCUMENT, "--set", "tp=2"], "unknown field (--set) for outofcore_llama3: 'tp'"),
    ([*DOCUMENT, "--proxy", "true-width"], "needs no true-width proxy"),
    ([*DOCUMENT, "--dtype", "fp8", "--gpu-type", "a100", "--scale", "1", "--force"], "has no fp8 gemms"),
    (
        [*DOCUMENT, "--host-gb", "20", "--device-gb", "2", "--set", "chunk_tokens=8192", *NOTHING_RESIDENT],
        "does not fit",
    ),
    (
        ["plan", "-w", "pretrain_grok1"],
        "made for out-of-core runs (outofcore_llama3), not for pretrain_grok1",
    ),
    (
        ["plan"],
        "name the run with -w, or the model with --model; plans are made for out-of-core runs: outofcore_llama3",
    ),
    (["plan", "-w", "outofcore_llama3", "-s", "9b"], "unknown size of outofcore_llama3 '9b'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=range(len(WRONG)))
def test_invalid_plan_request_is_one_line_and_exit_1(llmb_run, arguments, message):
    code, out, err = llmb_run(*arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("ERROR: ")
    assert err.count("\n") == 1


SEARCHED = [*DOCUMENT, "--set", "chunk_tokens=16384", "--set", "seqs_per_round=1", *NOTHING_RESIDENT]


@pytest.fixture
def smallest(llmb_run) -> int:
    """Device memory in GiB that the refusal of 2 GiB names."""
    _, _, err = llmb_run(*SEARCHED, "--device-gb", "2")
    match = re.search(r"with 178 GiB on the host it needs (\d+) GiB on the device", err)
    assert match, err
    return int(match[1])


@pytest.mark.slow
def test_refusal_names_the_smallest_budgets_that_fit(llmb_run, smallest):
    assert llmb_run(*SEARCHED, "--device-gb", str(smallest))[0] == 0
    assert llmb_run(*SEARCHED, "--device-gb", str(smallest - 1))[0] == 1


def test_plan_with_the_smallest_budget_stays_within_it(llmb_run, smallest):
    _, out, _ = llmb_run(*SEARCHED, "--device-gb", str(smallest), "--json")
    assert sum(json.loads(out)["device_bytes"].values()) <= smallest * 2**30


def test_budgets_from_the_environment(llmb_run, monkeypatch):
    monkeypatch.setenv("HOST_GB", "0.75")
    monkeypatch.setenv("DEVICE_GB", "2")
    code, out, err = llmb_run(*PROXY, "--json")
    assert code == 0, err
    assert (json.loads(out)["host_gib"], json.loads(out)["device_gib"]) == (0.75, 2)


def test_help_has_examples(llmb_run):
    code, out, _ = llmb_run("plan", "--help")
    assert code == 0
    assert "llmb-run plan -w outofcore_llama3 -s 8b --seqlen 65536 --host-gb 178 --device-gb 78" in out
