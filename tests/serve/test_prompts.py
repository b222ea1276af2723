"""Length distributions, unique synthetic prompts, and validation of dataset files."""

import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import llama_model

from llmb.config.spec import Inference
from llmb.errors import ConfigError
from llmb.serve.benchmark.prompts import ModelInfo, PromptSampler, measured_prompts, model_info, read_dataset

MODEL = llama_model(name="m", layers=1, hidden=8, ffn=8, heads=1, kv_heads=1, vocab=100)


def work(**changes) -> Inference:
    fields = {
        "mode": "max_throughput",
        "use_case": "chat",
        "isl": 20,
        "osl": 10,
        "max_batch_size": 4,
        "concurrency": 4,
        "max_num_tokens": 64,
        "kv_fraction": 0.5,
        "num_requests": 12,
    }
    return Inference(**fields | changes)


INFO = ModelInfo(100)


def sampled_prompts(info: ModelInfo = INFO, **changes):
    fields = work(**changes)
    return measured_prompts(fields, info, PromptSampler(fields.seed, info))


@pytest.mark.parametrize(
    ("lengths", "isl", "osl"),
    [("fixed", (20, 20), (10, 10)), ("uniform", (15, 25), (7, 13)), ("normal", (1, 60), (1, 40))],
)
def test_length_distributions(lengths: str, isl: tuple, osl: tuple) -> None:
    prompts = sampled_prompts(lengths=lengths, isl_spread=5.0, osl_spread=3.0, num_requests=2000)
    inputs, outputs = [len(p.tokens) for p in prompts], [p.output_tokens for p in prompts]
    assert isl[0] <= min(inputs) <= max(inputs) <= isl[1]
    assert osl[0] <= min(outputs) <= max(outputs) <= osl[1]
    if lengths == "uniform":
        assert {min(inputs), max(inputs)} == {15, 25}
    if lengths == "normal":
        assert statistics.mean(inputs) == pytest.approx(20, abs=0.5)
        assert statistics.stdev(inputs) == pytest.approx(5, abs=0.5)


@settings(max_examples=30, deadline=None)
@given(
    isl=st.integers(1, 9),
    spread=st.floats(0, 30),
    kind=st.sampled_from(["fixed", "uniform", "normal"]),
    seed=st.integers(0, 2**32),
    eos=st.frozensets(st.integers(0, 119), max_size=5),
)
def test_prompts_are_valid_and_reproducible(isl, spread, kind, seed, eos) -> None:
    info = ModelInfo(100, eos=eos)
    first, repeated = (
        sampled_prompts(info, isl=isl, lengths=kind, isl_spread=spread, osl_spread=spread, seed=seed) for _ in range(2)
    )
    assert first == repeated
    for prompt in first:
        assert prompt.tokens
        assert prompt.output_tokens >= 1
        assert all(0 <= token < 100 and token not in eos for token in prompt.tokens)


def test_every_token_but_eos_is_sampled() -> None:
    prompts = sampled_prompts(ModelInfo(7, eos=frozenset({0, 3, 4})), isl=400)
    assert {token for prompt in prompts for token in prompt.tokens} == {1, 2, 5, 6}


def test_prompts_are_unique_while_possible() -> None:
    draw = PromptSampler(1, ModelInfo(10))
    prompts = draw.prompts([(2, 1)] * 60) + draw.prompts([(2, 1)] * 20)
    assert len({tuple(p.tokens) for p in prompts}) == 80
    assert len(PromptSampler(1, ModelInfo(2)).prompts([(1, 1)] * 5)) == 5  # there are only two


def test_prompts_depend_on_seed() -> None:
    assert sampled_prompts(seed=1) != sampled_prompts(seed=2)


def dataset(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_dataset_of_token_ids(tmp_path) -> None:
    path = dataset(
        tmp_path,
        {"task_id": 0, "input_ids": [1, 2, 3], "output_tokens": 5},
        "",
        {"task_id": 1, "input_ids": [99], "output_tokens": 1, "lora_request": None},
    )
    prompts = read_dataset(path, ModelInfo(100))
    assert [(list(p.tokens), p.output_tokens) for p in prompts] == [([1, 2, 3], 5), ([99], 1)]
    assert len(sampled_prompts(dataset=str(path))) == 2  # fewer than num_requests
    assert len(sampled_prompts(dataset=str(path), num_requests=1)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "expected an object like"),
        ({"input_ids": [1]}, "output_tokens: expected a whole number, got None"),
        ({"input_ids": [1], "output_tokens": 0}, "output_tokens=0: must be at least 1"),
        ({"input_ids": [1], "output_tokens": True}, "output_tokens: expected a whole number, got True"),
        ({"output_tokens": 3}, "expected one of prompt, input_ids and messages"),
        ({"input_ids": [1], "prompt": "a", "output_tokens": 3}, "expected one of prompt, input_ids and messages"),
        ({"input_ids": [1, "2"], "output_tokens": 3}, "input_ids: expected a list of whole numbers"),
        ({"input_ids": [1, 100], "output_tokens": 3}, "input_ids: 100 is not in the model's vocabulary, 0 to 99"),
        ({"input_ids": [], "output_tokens": 3}, "the prompt is empty"),
        ({"input_ids": [1], "output_tokens": 3, "lora_request": {"id": 1}}, "lora_request is not served"),
        ({"prompt": "hello", "output_tokens": 3}, "a text needs a tokenizer, and random weights have none"),
    ],
)
def test_invalid_line_is_named_with_its_reason(tmp_path, line, reason: str) -> None:
    path = dataset(tmp_path, {"input_ids": [1], "output_tokens": 1}, line)
    with pytest.raises(ConfigError) as caught:
        read_dataset(path, ModelInfo(100))
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_datasets(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the dataset .*: No such file"):
        read_dataset(tmp_path / "none.jsonl", ModelInfo(100))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_dataset(tmp_path / "binary", ModelInfo(100))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        sampled_prompts(dataset=str(tmp_path / "empty"))


@pytest.fixture
def weights(tmp_path):
    """A Hugging Face folder without the weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(("<unk>", "a", "b", "c", "<end>"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 12, "eos_token_id": [4, 7]}))
    return tmp_path


def test_texts_are_tokenized(tmp_path, weights) -> None:
    path = dataset(tmp_path, {"task_id": 0, "prompt": "c a b x", "output_tokens": 2})
    (prompt,) = read_dataset(path, model_info(MODEL, str(weights)))
    assert list(prompt.tokens) == [3, 1, 2, 0]
    (weights / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"line 1: .* is not a tokenizer"):
        read_dataset(path, model_info(MODEL, str(weights)))
    (weights / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"line 1: a text needs a tokenizer, and .*tokenizer.json does not exist"):
        read_dataset(path, model_info(MODEL, str(weights)))


def test_request_longer_than_context_is_refused(tmp_path, weights) -> None:
    info = model_info(MODEL, str(weights))
    assert info.eos == {4, 7}
    path = dataset(tmp_path, *({"input_ids": [1] * n, "output_tokens": 4} for n in (8, 9)))
    with pytest.raises(ConfigError) as caught:
        sampled_prompts(info, dataset=str(path))
    assert f"{path}: request 2 has 9 + 4 tokens, more than the 12 of the model's context" in str(caught.value)
    with pytest.raises(ConfigError, match="isl=20, osl=10, lengths=fixed: request 1 has 20"):
        sampled_prompts(info)
    assert model_info(MODEL, None) == ModelInfo(100)
