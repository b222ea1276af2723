"""`llmb-run plan`: the figures of the document, budgets that cannot be, sequences that no chunk divides."""

import json
import re

import pytest

DOCUMENT = [
    "plan", "-w", "outofcore_llama3", "-s", "8b", "--seqlen", "65536", "--host-gb", "178", "--device-gb", "78",
]  # fmt: skip
# Everything fixed leaves nothing to search: these tests are about what is said of a plan.
FIXED = [
    word
    for wish in (
        "chunk_tokens=16384", "seqs_per_round=1", "gbs=5", "resident_params=4", "resident_grads=38",
        "resident_states=0", "full_saves=73",
    )
    for word in ("--set", wish)
]  # fmt: skip
STAND_IN = ["plan", "-w", "outofcore_llama3", "-s", "8b", "--dtype", "bf16", "--proxy"]


@pytest.fixture
def document(llmb_run):
    code, out, err = llmb_run(*DOCUMENT, *FIXED, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_plan_of_the_document_has_every_figure_it_prints(document):
    cut = {"chunk_size": 16384, "chunks_per_round": 4, "seqs_per_round": 1, "rounds_per_step": 5, "seqs_per_step": 5}
    assert cut.items() <= document.items()
    assert document["global_batch_tokens"] == 5 * 65536
    on_device = document["activation_slots"] + document["light_slots"]
    assert document["host_activations"] == 32 * 4 - on_device
    saved = [document[name] for name in ("host_fully_saved", "host_inp_context_attn", "host_inp_context")]
    assert sum(saved) == document["host_activations"]
    assert document["published"].keys() <= document.keys()


def test_what_is_predicted_hangs_together(document):
    assert document["tokens_per_s"] == pytest.approx(5 * 65536 / document["step_s"])
    assert 0 < document["mfu"] < document["hfu"] < 1
    assert 0 < document["recompute_share"] < 0.2
    assert document["compute_share"] <= 1
    assert document["bound"].startswith(("computation bounds it", "the link bounds it", "order bounds it"))
    for side in ("host", "device"):
        assert 0 < sum(document[f"{side}_bytes"].values()) <= document[f"{side}_gib"] * 2**30
    assert "H200" in document["rates"]["source"]


def test_units_are_resident_or_at_home(document):
    places = {place["kind"]: place for place in document["places"]}
    for kind, resident in (("param", 4), ("grad", 38), ("state", 0)):
        assert places[kind]["resident"] == resident
        assert places[kind]["resident"] + places[kind]["at_home"] == document["units"] == 38
    assert places["rest"]["at_home"] == document["host_fully_saved"]


def test_a_person_gets_tables_with_the_published_plan_beside_ours(llmb_run):
    code, out, err = llmb_run(*DOCUMENT, *FIXED)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["plan", "here", "published", "what", "it", "says"] in lines
    assert ["chunk", "size", "16,384", "16,384"] in [line[:4] for line in lines]
    assert ["seqs", "per", "round", "1", "1"] in [line[:5] for line in lines]
    for heading in ("where it rests", "memory", "expected of a step", "rates"):
        assert any(line.startswith(heading + "  ") for line in out.splitlines()), heading
    assert " bounds it: " in out
    assert out.count("GiB of host and 78 GiB of device memory") == 1


def test_another_gpu_has_other_rates_and_no_published_plan(llmb_run):
    code, out, _ = llmb_run(*DOCUMENT, *FIXED, "--gpu-type", "a100", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["gpu"] == found["rates"]["gpu"] == "a100"
    assert found["published"] is None


def test_the_last_chunk_of_a_prime_sequence_is_shorter(llmb_run):
    code, out, _ = llmb_run(*DOCUMENT, *FIXED, "--seqlen", "65537")
    assert code == 0
    assert "; the last of a sequence has 1" in out


def test_a_stand_in_streams_and_has_no_times_on_a_cpu_that_nobody_measured(llmb_run):
    code, out, err = llmb_run(*STAND_IN, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["step_s"] is found["mfu"] is found["bound"] is None
    assert (found["chunks_per_round"], found["rounds_per_step"]) == (4, 2)
    assert all(found[name] > 0 for name in ("host_fully_saved", "host_inp_context_attn", "host_inp_context"))
    assert all(place["at_home"] > 0 for place in found["places"] if place["resident"] is not None)
    code, out, _ = llmb_run(*STAND_IN)
    assert code == 0
    assert "`llmb-run probe` measures this machine" in out


def test_measured_rates_are_taken_where_there_are_some(llmb_run, tmp_path):
    from llmb.config.serialization import to_json
    from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU, rates_path

    path = rates_path(tmp_path / "llmb", "cpu")
    path.parent.mkdir(parents=True)
    path.write_text(to_json(NOMINAL_CPU).replace("nominal", "measured on Monday"))
    code, out, _ = llmb_run(*STAND_IN, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["step_s"] > 0
    assert found["mfu"] is None  # a CPU has no published peak
    assert found["rates"]["source"] == "measured on Monday"


def test_what_this_machine_does_not_have_is_said(llmb_run):
    code, _, err = llmb_run(*STAND_IN, "--host-gb", "1000000")
    assert code == 0
    assert err.count("\n") == 1
    assert err.startswith("warning: the plan wants 1e+06 GiB of host memory, this machine has ")


RESIDENT_NOWHERE = [w for kind in ("params", "grads", "states") for w in ("--set", f"resident_{kind}=0")]
WRONG = [
    ([*DOCUMENT, "--host-gb", "0"], "host_gib (--host-gb): 0.0 is out of range; it must be more than 0"),
    ([*DOCUMENT, "--device-gb", "-3"], "device_gib (--device-gb): -3.0 is out of range; it must be more than 0"),
    ([*DOCUMENT, "--device-gb", "much"], "device_gib: expected a number, got 'much'"),
    ([*DOCUMENT, "--seqlen", "0"], "seqlen (--seqlen): 0 is out of range; it must be at least 1"),
    ([*DOCUMENT, "--set", "update=best"], "choices are: master, stochastic, nearest"),
    ([*DOCUMENT, "--set", "clip=0"], "clip (--set): 0.0 is out of range; it must be more than 0"),
    ([*DOCUMENT, "--set", "plan=mine"], "unknown field (--set) for outofcore_llama3: 'plan'"),
    ([*DOCUMENT, "--set", "pack=true"], "pack has no effect on synthetic tokens"),
    ([*DOCUMENT, "--set", "model.gated=false"], "out-of-core training is for plain Llamas"),
    ([*DOCUMENT, "--set", "tp=2"], "unknown field (--set) for outofcore_llama3: 'tp'"),
    ([*DOCUMENT, "--proxy", "true-width"], "needs no stand-in of true width"),
    ([*DOCUMENT, "--dtype", "fp8", "--gpu-type", "a100", "--scale", "1", "--force"], "has no products in fp8"),
    (
        [*DOCUMENT, "--host-gb", "20", "--device-gb", "2", "--set", "chunk_tokens=8192", *RESIDENT_NOWHERE],
        "does not fit",
    ),
    (
        ["plan", "-w", "pretrain_grok1"],
        "made for out-of-core runs (outofcore_llama3), not for pretrain_grok1",
    ),
    (["plan"], "name the run with -w; plans are made for out-of-core runs: outofcore_llama3"),
    (["plan", "-w", "outofcore_llama3", "-s", "9b"], "unknown size of outofcore_llama3 '9b'"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_is_one_line_and_exit_1(llmb_run, arguments, said):
    code, out, err = llmb_run(*arguments)
    assert (code, out) == (1, "")
    assert said in err
    assert err.startswith("ERROR: ")
    assert err.count("\n") == 1


SEARCHED = [*DOCUMENT, "--set", "chunk_tokens=16384", "--set", "seqs_per_round=1", *RESIDENT_NOWHERE]


@pytest.fixture
def smallest(llmb_run) -> int:
    """GiB on the device that the refusal of 2 GiB names."""
    _, _, err = llmb_run(*SEARCHED, "--device-gb", "2")
    named = re.search(r"beside 178 GiB on the host it needs (\d+) GiB on the device", err)
    assert named, err
    return int(named[1])


def test_what_does_not_fit_names_the_smallest_budgets_that_do(llmb_run, smallest):
    assert llmb_run(*SEARCHED, "--device-gb", str(smallest))[0] == 0
    assert llmb_run(*SEARCHED, "--device-gb", str(smallest - 1))[0] == 1


def test_the_tightest_plan_stays_within_its_budget(llmb_run, smallest):
    _, out, _ = llmb_run(*SEARCHED, "--device-gb", str(smallest), "--json")
    assert sum(json.loads(out)["device_bytes"].values()) <= smallest * 2**30


def test_budgets_may_come_from_the_environment(llmb_run, monkeypatch):
    monkeypatch.setenv("HOST_GB", "0.75")
    monkeypatch.setenv("DEVICE_GB", "2")
    code, out, err = llmb_run(*STAND_IN, "--json")
    assert code == 0, err
    assert (json.loads(out)["host_gib"], json.loads(out)["device_gib"]) == (0.75, 2)


def test_help_has_examples(llmb_run):
    code, out, _ = llmb_run("plan", "--help")
    assert code == 0
    assert "llmb-run plan -w outofcore_llama3 -s 8b --seqlen 65536 --host-gb 178 --device-gb 78" in out
