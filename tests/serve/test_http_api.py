"""The API by OpenAI's own client: completions and chats, streamed or not, log probabilities, stop strings, errors."""

import asyncio
import json
import math

import pytest
import torch
from live_server import MODEL, LiveServer, server_config
from output_collector import OutputCollector
from small_served import SINGLE_RANK_INFO, logits_of, served_model_for

from llmb.serve.engine_builder import build_engine
from llmb.serve.http.chunk_format import token_name
from llmb.serve.request import Request
from llmb.serve.text.text_tokenizer import eos_tokens, load_tokenizer

pytestmark = pytest.mark.slow
NAME = "small-llama"
PROMPTS = ["In the beginning", "And God said, Let there be", "The LORD is my shepherd; I shall not want."]
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def tokenizer(weights_folder):
    return load_tokenizer(MODEL, str(weights_folder))


@pytest.fixture(scope="module")
def engine_outputs(weights_folder, tokenizer):
    """Greedy outputs of the engine in this process, by prompt tokens."""
    engine = build_engine(server_config(weights_folder), SINGLE_RANK_INFO, max_seq_len=256)
    collector = OutputCollector()
    for number, prompt in enumerate(PROMPTS):
        tokens = tokenizer.encode(prompt, add_special_tokens=True)
        eos = eos_tokens(MODEL, str(weights_folder))
        engine.submit(collector.listen(Request(request_id=number, prompt=tokens, max_tokens=24, eos=eos)))
    engine.drain()
    return collector.outputs


def text_of(tokenizer, tokens) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(map(detokenizer.push, tokens)) + detokenizer.finish()


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_greedy_output_is_the_engine_s(live_server, engine_outputs, tokenizer, number):
    completion = live_server.client().completions.create(prompt=PROMPTS[number], logprobs=0, **GREEDY)
    choice, expected = completion.choices[0], engine_outputs[number]
    assert choice.text == text_of(tokenizer, expected.token_ids)
    assert choice.logprobs.tokens == [token_name(tokenizer, token) for token in expected.token_ids]
    assert choice.finish_reason == expected.finish_reason
    assert completion.usage.completion_tokens == len(expected.token_ids)


def test_stream_has_the_same_text_and_usage(live_server, engine_outputs, tokenizer):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(live_server.client().completions.create(prompt=PROMPTS, **GREEDY, **options))
    texts = ["", "", ""]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [text_of(tokenizer, engine_outputs[number].token_ids) for number in range(3)]
    ends = {c.choices[0].index: c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason}
    assert ends == {number: engine_outputs[number].finish_reason for number in range(3)}
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage.completion_tokens == sum(len(output.token_ids) for output in engine_outputs.values())
    assert usage.prompt_tokens == sum(len(tokenizer.encode(prompt, True)) for prompt in PROMPTS)
    assert usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("chat", [False, True])
def test_continuous_usage_counts_tokens_of_each_output_so_far(live_server, chat):
    """vLLM's extension, which GuideLLM always asks for."""
    client = live_server.client()
    options = {"n": 2, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if chat:
        messages = [{"role": "user", "content": PROMPTS[0]}]
        chunks = list(client.chat.completions.create(messages=messages, **GREEDY, **options))
    else:
        chunks = list(client.completions.create(prompt=PROMPTS[:2], **GREEDY, **options))
    counts: dict[int, list[int]] = {}
    for chunk in chunks[:-1]:
        counts.setdefault(chunk.choices[0].index, []).append(chunk.usage.completion_tokens)
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
    assert all(count == sorted(count) and count[0] >= 1 for count in counts.values())
    assert sum(count[-1] for count in counts.values()) == chunks[-1].usage.completion_tokens


def test_prompts_of_tokens_are_those_of_text(live_server, tokenizer):
    client = live_server.client()
    tokens = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in PROMPTS]
    by_text = client.completions.create(prompt=PROMPTS, **GREEDY)
    by_tokens = client.completions.create(prompt=tokens, **GREEDY)
    single = client.completions.create(prompt=tokens[1], **GREEDY)
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_tokens.choices]
    assert single.choices[0].text == by_text.choices[1].text


def test_repeated_prompt_comes_from_the_prefix_cache(live_server, tokenizer):
    prompt = "Blessed is the man that walketh not in the counsel of the ungodly, nor standeth in the way of sinners"
    usages = [live_server.client().completions.create(prompt=prompt, **GREEDY).usage for _ in range(2)]
    assert len(tokenizer.encode(prompt, True)) == usages[0].prompt_tokens
    cached = usages[1].prompt_tokens_details.cached_tokens
    assert cached == (usages[0].prompt_tokens - 1) // 16 * 16 > 0


def test_logprobs_are_the_log_softmax_of_the_logits(live_server, weights_folder, tokenizer):
    tokens = tokenizer.encode(PROMPTS[0], add_special_tokens=True)
    completion = live_server.client().completions.create(prompt=tokens, logprobs=3, **GREEDY)
    logprobs = completion.choices[0].logprobs
    sampled = {"logprobs": True, "top_logprobs": 2, "temperature": 0.7, "seed": 3, "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": "Hi"}]} | sampled
    reply = live_server.post("/v1/chat/completions", chat)
    content = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(bytes(entry["bytes"]).decode(errors="replace") == entry["token"] for entry in content)
    for entry in content:
        first, second = (top["logprob"] for top in entry["top_logprobs"])
        assert max(second, entry["logprob"]) <= first
    model = served_model_for(server_config(weights_folder))
    sequence = list(tokens)
    for text, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        expected_V = logits_of(model, sequence)[-1].float().log_softmax(dim=-1)
        token = int(expected_V.argmax())
        assert token_name(tokenizer, token) == text
        assert logprob == pytest.approx(expected_V[token].item(), abs=1e-3)
        assert sorted(top.values(), reverse=True) == pytest.approx(torch.topk(expected_V, 3).values.tolist(), abs=1e-3)
        sequence.append(token)


def test_stop_string_ends_the_output_and_is_not_in_it(live_server):
    client = live_server.client()
    whole = client.completions.create(prompt=PROMPTS[1], **GREEDY).choices[0].text
    stop = whole[6:11]
    expected = whole[: whole.index(stop)]
    completion = client.completions.create(prompt=PROMPTS[1], stop=[stop, "not in it"], **GREEDY)
    assert completion.choices[0].text == expected
    assert completion.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(prompt=PROMPTS[1], stop=stop, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    live_server.wait_idle()


def test_seed_repeats_samples_and_n_gives_different_ones(live_server):
    client = live_server.client()
    sampled = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 1.5, "n": 3}
    first, second = (client.completions.create(seed=7, **sampled) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage.completion_tokens <= 36
    greedy = client.completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].text
    top_k = client.completions.create(prompt=PROMPTS[0], **GREEDY | {"temperature": 1.5}, extra_body={"top_k": 1})
    assert top_k.choices[0].text == greedy


def test_chat_uses_the_template_and_its_end_of_turn(live_server, tokenizer):
    client = live_server.client()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "are you?"}]},
    ]
    text = "<|begin|><|role|>system\nBe brief.<|end|><|role|>user\nWho\nare you?<|end|><|role|>assistant\n"
    chat = client.chat.completions.create(messages=messages, model=NAME, temperature=0, max_completion_tokens=9)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    completion = client.completions.create(prompt=tokens, **GREEDY | {"max_tokens": 9})
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.usage.prompt_tokens == len(tokens)
    stream = client.chat.completions.create(messages=messages, model=NAME, temperature=0, max_tokens=9, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == completion.choices[0].text


def test_eos_of_the_generation_config_ends_a_chat(live_server, tokenizer):
    """With a hot temperature some of many outputs meet token 0 or 3; none of their texts shows it."""
    completion = live_server.client().completions.create(
        model=NAME, prompt="Amen", max_tokens=200, temperature=2.0, n=16, seed=1, logprobs=0
    )
    stopped = [choice for choice in completion.choices if choice.finish_reason == "stop"]
    assert stopped
    assert {choice.logprobs.tokens[-1] for choice in stopped} <= {"<|endoftext|>", "<|end|>"}
    assert not any("<|" in choice.text for choice in completion.choices)
    ignored = live_server.complete(prompt="Amen", max_tokens=200, temperature=2.0, n=16, seed=1, ignore_eos=True).json()
    assert all(choice["finish_reason"] == "length" for choice in ignored["choices"])
    assert ignored["usage"]["completion_tokens"] == 16 * 200


def test_many_asynchronous_streams(live_server, engine_outputs, tokenizer):
    async def read(client, prompt):
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def read_all():
        async with live_server.async_client() as client:
            return await asyncio.gather(*(read(client, PROMPTS[number % 3]) for number in range(48)))

    texts = asyncio.run(read_all())
    expected = [text_of(tokenizer, engine_outputs[number].token_ids) for number in range(3)]
    assert texts == [expected[number % 3] for number in range(48)]


def test_errors_are_the_client_s_exceptions(live_server):
    import openai  # a second, which only the worker of this file spends

    client = live_server.client()
    with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 2"):
        client.completions.create(model=NAME, prompt="a", temperature=9)
    with pytest.raises(openai.NotFoundError, match="small-llama"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
        client.completions.create(model=NAME, prompt="a", logit_bias={"5": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="a", max_tokens=256)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no tools"):
        client.chat.completions.create(model=NAME, messages=[{"role": "tool", "content": "x", "tool_call_id": []}])
    assert client.models.list().data[0].id == NAME
    assert client.models.retrieve(NAME).id == NAME


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "the body is not JSON"),
        (b"{", 400, "the body is not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b"[" * 40_000, 400, "the body is not JSON"),
        (b'{"prompt": NaN}', 400, "NaN"),
        (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        (b'{"max_tokens": 3}', 400, "prompt is missing"),
        ({"prompt": ""}, 400, "prompt is empty"),
        ({"prompt": []}, 400, "prompt must be"),
        ({"prompt": [[1], "a"]}, 400, "prompt must be"),
        ({"prompt": [1, True]}, 400, "prompt must be"),
        ({"prompt": [600]}, 400, "outside the vocabulary, 0 to 599"),
        ({"prompt": [-1]}, 400, "outside the vocabulary"),
        ({"prompt": [10**30]}, 400, "outside the vocabulary"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be an integer at least 1"),
        ({"prompt": "a", "max_tokens": 10**30}, 400, "the maximum is 256 together"),
        ({"prompt": "a", "n": 1000}, 400, "n must be an integer from 1 to 128"),
        ({"prompt": ["a"] * 100, "n": 2}, 400, "more than 128 outputs"),
        ({"prompt": "a", "echo": True}, 400, "echo is not supported"),
        ({"prompt": "a", "stop": [""]}, 400, "stop must be"),
        ({"prompt": "a", "stop": ["a"] * 17}, 400, "stop may hold 16 strings"),
        ({"prompt": "a", "seed": 1.5}, 400, "seed must be an integer"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p must be above 0"),
        ({"prompt": "a", "stream": 1}, 400, "stream must be true or false"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "needs stream: true"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs must be an integer from 0 to 20"),
        ({"prompt": "a", "temprature": 0}, 400, "did you mean temperature?"),
        ({"prompt": "a", "min_tokens": 3}, 400, "min_tokens is supported with ignore_eos"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options may hold"),
        ({"prompt": list(range(256))}, 400, "the prompt has 256 tokens"),
        (b'{"prompt": "' + b"a" * 60_000 + b'"}', 413, "the body is larger than 52428 bytes"),
    ],
)  # fmt: skip
def test_bad_bodies_get_one_clear_line(live_server: LiveServer, body, status, words):
    reply = live_server.post("/v1/completions", body)
    error = reply.json()["error"]
    assert reply.status == status
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_fields_without_effect_are_accepted(live_server):
    reply = live_server.complete(
        prompt="a", max_tokens=1, user="me", metadata={"a": "b"}, store=True, logit_bias={}, best_of=1, echo=False,
        presence_penalty=0.0, stop=None, suffix=None, service_tier="auto",
    )  # fmt: skip
    assert reply.status == 200, reply.text


def test_usage_in_every_chunk(live_server):
    fields = {"prompt": "In the", "max_tokens": 6, "ignore_eos": True, "min_tokens": 6, "n": 2, "stream": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    reply = live_server.complete(**fields, **options)
    events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    ends = [event["usage"] for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
    assert [usage["completion_tokens"] for usage in ends] == [6, 6]
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert all(event["usage"]["prompt_tokens"] == ends[0]["prompt_tokens"] for event in events)


def test_unknown_addresses_and_methods_are_errors_in_json(live_server):
    for reply in (live_server.get("/v1/completions"), live_server.post("/v1/embeddings", {})):
        assert reply.status in (404, 405)
        assert "/v1/chat/completions" in reply.json()["error"]["message"]


def test_metrics_count_requests_and_tokens_once(live_server):
    before = live_server.wait_idle()
    usage = live_server.complete(prompt=PROMPTS, max_tokens=7, n=2, ignore_eos=True).json()["usage"]
    after = live_server.wait_idle()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert usage["completion_tokens"] == 42
    assert grown("vllm:generation_tokens_total") == 42
    assert grown("vllm:prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert grown('vllm:request_success_total{finished_reason="length"}') == 6
    assert grown("vllm:time_to_first_token_seconds_count") == 6
    assert grown("vllm:inter_token_latency_seconds_count") == 36
    assert grown("vllm:e2e_request_latency_seconds_count") == 6
    assert grown('llmb:http_responses_total{status="200"}') == 1
    assert after['vllm:kv_cache_usage_perc{engine="0"}'] == 0
    assert math.isclose(after['llmb:kv_blocks{engine="0"}'], before['llmb:kv_blocks{engine="0"}'])


def test_no_prompt_or_output_is_logged(live_server):
    live_server.complete(prompt="Nebuchadnezzar", max_tokens=1)
    live_server.complete(prompt="Nebuchadnezzar", max_tokens="Nebuchadnezzar")
    assert "Nebuchadnezzar" not in live_server.output
    assert json.dumps(live_server.lines).count("Traceback") == 0
