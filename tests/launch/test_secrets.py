"""Secret values never reach a file."""

import pytest

from llmb.launch.secrets import mask, scrub, secret_values

HF = "hf_" + "aB3" * 9


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "GITHUB_TOKEN", "TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS", "DB_PASSWORD", "KEYS"],
)
def test_secret_by_name(name):
    assert mask({name: "anything"}) == {name: "***"}


@pytest.mark.parametrize(
    "name", ["MAX_NUM_TOKENS", "TOKENIZERS_PARALLELISM", "PATH", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"]
)
def test_not_secret_by_name(name):
    assert mask({name: "anything"}) == {name: "anything"}


@pytest.mark.parametrize(
    ("secret", "suffix"),
    [
        (HF, ""),
        ("sk-" + "Ab_-9" * 6, ""),
        ("AKIA" + "ABCD2345" * 2, ""),
        ("nvapi-" + "x" * 30, ""),
        ("ghp_" + "x" * 30, ""),
        ("user:pass", "@"),
    ],
)
def test_secret_by_pattern(secret, suffix):
    address = f"https://{secret}@host" if suffix else secret
    assert mask({"PLAIN": address}) == {"PLAIN": "***"}
    assert secret not in scrub(f"GET {address}, next")
    assert scrub(f"a {address} b").endswith(" b")


@pytest.mark.parametrize(
    "text", ["hf_hub_download", "risk-based-learning-rate-schedule-of-the-task", "http://host:80/a@b"]
)
def test_ordinary_text_is_not_scrubbed(text):
    assert scrub(text) == text
    assert mask({"PLAIN": text}) == {"PLAIN": text}


def test_values_are_scrubbed_by_line_and_as_quoted():
    values = secret_values({"SSH_KEY": "first line\nsecond\\line", "KEY_ON": "true", "PLAIN": "visible"})
    assert scrub("first line|second\\line|second\\\\line|true|visible", values) == "***|***|***|true|visible"


def test_longer_secret_is_scrubbed_first():
    values = secret_values({"A_KEY": "abcdef", "B_KEY": "abcdefghi"})
    assert scrub("abcdefghi abcdef", values) == "*** ***"
