import pytest

from llmb.errors import ConfigError
from llmb.serve.block_pool import BlockPool
from llmb.serve.request import Request
from llmb.serve.step_limits import Limits, refuse

LIMITS = Limits(max_batch_size=2, max_num_tokens=16, max_length=100)


def judge(prompt=4, max_tokens=4, stop=(), blocks=10, limits=LIMITS):
    request = Request(number=7, prompt=[1] * prompt, max_tokens=max_tokens, stop=stop)
    refuse(request, limits, BlockPool(blocks, 8, prefix_cache=False))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompt": 0}, ["request 7", "empty prompt"]),
        ({"max_tokens": 0}, ["request 7", "max_tokens must be at least 1"]),
        ({"stop": ((1,), ())}, ["empty stop sequence"]),
        ({"prompt": 90, "max_tokens": 11}, ["prompt of 90", "answer of 11", "101 together", "100"]),
        ({"prompt": 60, "max_tokens": 22}, ["need 11 blocks of 8 tokens", "it has 10", "KV_CACHE_FRACTION"]),
    ],
)
def test_what_can_never_be_answered_is_refused_with_the_numbers(request_, words):
    with pytest.raises(ConfigError) as refusal:
        judge(**request_)
    text = str(refusal.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_a_prompt_beyond_a_step_needs_chunks():
    whole = Limits(max_batch_size=2, max_num_tokens=16, max_length=100, chunked_prefill=False)
    judge(prompt=16, limits=whole)
    judge(prompt=17)
    with pytest.raises(ConfigError, match=r"a step computes 16: raise MAX_NUM_TOKENS to 17 or turn chunked prefill on"):
        judge(prompt=17, limits=whole)


def test_what_fits_exactly_is_accepted():
    judge(prompt=60, max_tokens=21)  # the last token takes no place in the cache: 80 do
    judge(prompt=90, max_tokens=10, blocks=13)
