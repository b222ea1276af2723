"""Lengths, datasets, traces, shared prefixes: what is sent, and that wrong files are refused in one line."""

import json
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.config.load_settings import LoadSettings, check_load
from llmb.errors import ConfigError
from llmb.loadgen.client.request_body import RequestRenderer
from llmb.loadgen.prompt_sampler import random_tokens
from llmb.loadgen.prompt_text import TextWriter
from llmb.loadgen.request_source import RequestSource
from llmb.loadgen.traces import read_trace

DATA = Path(__file__).parents[2] / "data"


def load(**changes) -> LoadSettings:
    fields = {"base_url": "http://h", "model": "m", "isl": 40, "osl": 10, "concurrency": 2, "num_requests": 20}
    return LoadSettings(**fields | changes)


def prompts(source: RequestSource, count: int) -> list:
    return [source.session(number).turns[0] for number in range(count)]


def test_texts_have_their_words_and_differ_from_the_first_on():
    requests = prompts(RequestSource(load()), 300)
    assert {len(r.prompt.split()) for r in requests} == {40}
    assert len({tuple(r.prompt.split()[:3]) for r in requests}) == 300
    assert requests == prompts(RequestSource(load()), 300)
    assert requests != prompts(RequestSource(load(seed=2)), 300)
    assert {r.input_tokens for r in requests} == {40}
    assert {r.cacheable_tokens for r in requests} == {0}


def test_warm_up_prompts_are_others():
    source = RequestSource(load())
    assert not {source.warmup(n).turns[0].prompt for n in range(20)} & {r.prompt for r in prompts(source, 20)}


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 0.0),
        ({"duration_s": 90.0}, 90.0),
        ({"arrivals": "poisson", "rate": 2.0, "num_requests": 7200}, 3600.0),
        ({"arrivals": "constant", "rate": 2.0, "num_requests": 7200, "duration_s": 60.0}, 60.0),
    ],
)
def test_the_time_of_the_arrivals_is_known_beforehand(changes, seconds):
    assert RequestSource(load(**changes)).planned_s == seconds


def test_token_ids_are_in_the_vocabulary_and_differ():
    requests = prompts(RequestSource(load(prompt_format="ids", vocab_size=50)), 200)
    assert all(3 <= token < 50 for r in requests for token in r.prompt)
    assert len({tuple(r.prompt[:2]) for r in requests}) == 200


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_length_distributions(kind):
    source = RequestSource(load(lengths=kind, isl_spread=8.0, osl_spread=4.0))
    requests = prompts(source, 800)
    lengths = [len(r.prompt.split()) for r in requests]
    assert statistics.fmean(lengths) == pytest.approx(40, abs=1)
    assert statistics.fmean(r.output_tokens for r in requests) == pytest.approx(10, abs=0.6)
    assert statistics.stdev(lengths) == pytest.approx(8 if kind == "normal" else 17 / 12**0.5, rel=0.1)


def test_empirical_lengths_come_from_the_file(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input,output\n30,5\n[20, 7]\n\n")
    source = RequestSource(load(lengths="empirical", lengths_file=str(path)))
    assert {(len(r.prompt.split()), r.output_tokens) for r in prompts(source, 50)} == {(30, 5), (20, 7)}
    path.write_text("30\n")
    with pytest.raises(ConfigError, match="line 1: expected an input and an output length"):
        RequestSource(load(lengths="empirical", lengths_file=str(path)))


def test_prefixes_are_shared_within_groups():
    requests = prompts(RequestSource(load(prefix_fraction=0.5, prefix_groups=4)), 12)
    heads = [r.prompt.split()[:20] for r in requests]
    assert heads[0] == heads[4] == heads[8] != heads[1]
    assert len({tuple(r.prompt.split()[20:]) for r in requests}) == 12
    assert [r.cacheable_tokens for r in requests] == [0] * 4 + [20] * 8


def test_sessions_have_turns_of_new_text():
    session = RequestSource(load(turns=3)).session(5)
    assert len({turn.prompt for turn in session.turns}) == 3
    assert RequestSource(load(turns=3)).count == 7  # sessions for 20 requests


MOONCAKE = [
    {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 6, "hash_ids": [1, 2, 3]},
    {"timestamp": 4000, "input_length": 400, "output_length": 0, "hash_ids": [9]},
]


def test_mooncake_traces_share_blocks(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    rows = read_trace(path, speedup=2.0)
    assert [row.time_s for row in rows] == [0.0, 1.0, 1.5]
    assert [row.cacheable_tokens for row in rows] == [0, 1024, 0]
    source = RequestSource(load(trace=str(path), arrivals="trace", concurrency=None, num_requests=None))
    first, second, third = (source.session(n).turns[0].prompt.split() for n in range(3))
    assert source.count == 3
    assert source.planned_s == 3.0  # of the trace as it is; the load has no speed-up
    assert (len(first), len(second), len(third)) == (600, 1100, 400)
    assert second[:512] == first[:512]
    assert third[:50] != first[:50]


def test_azure_traces(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.9799600,396,9\n"
    )
    rows = read_trace(path)
    assert [(round(row.time_s, 6), row.input_tokens, row.output_tokens) for row in rows] == [
        (0, 374, 44),
        (1.0, 396, 9),
    ]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n")
    with pytest.raises(ConfigError, match="line 2: expected TIMESTAMP"):
        read_trace(path)
    path.write_text('{"time": 1}\n')
    with pytest.raises(ConfigError, match="line 1: expected timestamp"):
        read_trace(path)


def test_datasets_of_every_form(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a b", "output_tokens": 3}\n{"input_ids": [1, 2], "output_tokens": 4}\n')
    requests = prompts(RequestSource(load(dataset=str(path), num_requests=None)), 2)
    assert [(r.output_tokens, r.input_tokens) for r in requests] == [(3, None), (4, 2)]
    with pytest.raises(ConfigError, match="token ids, which chat does not take"):
        RequestSource(load(dataset=str(path), endpoint="chat"))
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (request,) = prompts(RequestSource(load(dataset=str(path), endpoint="chat")), 1)
    assert request.output_tokens == 10  # osl, as the line names none
    with pytest.raises(ConfigError, match="holds messages"):
        RequestSource(load(dataset=str(path)))
    turns = [{"from": "human", "value": "why so"}, {"from": "gpt", "value": "because it is"}]
    (tmp_path / "share.json").write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    source = RequestSource(load(dataset=str(tmp_path / "share.json"), num_requests=None))
    assert source.count == 1
    assert source.session(0).turns[0].prompt == "why so"
    assert source.session(0).turns[0].output_tokens == 3


def test_a_tokenizer_makes_lengths_exact(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(("<unk>", "time", "year"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("e", "isolated")  # splits many words into several tokens
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = RequestSource(load(tokenizer=str(tmp_path)))
    assert {len(source.tokenizer.encode(r.prompt).ids) for r in prompts(source, 20)} <= set(range(37, 42))
    with pytest.raises(ConfigError, match=r"none does not exist; give a folder with tokenizer.json"):
        RequestSource(load(tokenizer=str(tmp_path / "none")))


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 200), vocab=st.integers(6, 10**6), excluded=st.sets(st.integers(0, 5), max_size=3))
def test_random_tokens_avoid_the_excluded(count, vocab, excluded):
    from random import Random

    tokens = random_tokens(Random(1), count, vocab, sorted(excluded))
    assert len(tokens) == count
    assert all(0 <= token < vocab and token not in excluded for token in tokens)


def test_words_are_counted_without_a_tokenizer():
    assert TextWriter().count("a bc  d") == 3


@pytest.mark.parametrize("tokens", [1, 7, 40, 500])
def test_texts_are_exact_where_words_are_several_tokens(tokens):
    """data/tokenizer.json has a small vocabulary, in which most words are several tokens."""
    source = RequestSource(load(isl=tokens, tokenizer=str(DATA)))
    assert {len(source.tokenizer.encode(r.prompt).ids) for r in prompts(source, 20)} == {tokens}


def body_of(**changes) -> dict:
    settings = load(**changes)
    payload = RequestRenderer(settings, None).payload(RequestSource(settings).session(0).turns[0])
    return json.loads(payload.partition(b"\r\n\r\n")[2])


def test_bodies_follow_the_quirks_of_a_server():
    plain = body_of(endpoint="chat")
    assert list(plain) == ["model", "temperature", "stream", "stream_options", "ignore_eos", "max_tokens", "messages"]
    text = (
        '{"ignore_eos": null, "stream_options": null, "temperature": 0.5, "chat_template_kwargs": {"thinking": false}}'
    )
    quirks = body_of(endpoint="chat", max_completion_tokens=True, extra_body=text)
    changed = {"temperature": 0.5, "chat_template_kwargs": {"thinking": False}, "max_completion_tokens": 10}
    unchanged = {name: plain[name] for name in ("model", "stream", "messages")}
    assert quirks == unchanged | changed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "extra_body '{': Expecting property name"),
        ("[1]", "extra_body '[1]': expected a JSON object such as"),
        ('{"max_tokens": 5}', "extra_body: the load itself sets max_tokens; leave it out"),
    ],
)
def test_wrong_extra_bodies_are_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_load(load(extra_body=text))
