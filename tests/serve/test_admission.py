import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.errors import ConfigError
from llmb.serve.admission import AdmissionCheck, SchedulerLimits, check_request
from llmb.serve.kv_cache.block_pool import BlockPool
from llmb.serve.request import Request, Sequence

LIMITS = SchedulerLimits(max_batch_size=2, max_num_tokens=16, max_seq_len=100)


def check(prompt=4, max_tokens=4, stop=(), blocks=10, limits=LIMITS):
    request = Request(request_id=7, prompt=[1] * prompt, max_tokens=max_tokens, stop=stop)
    check_request(request, limits, BlockPool(blocks, 8, prefix_cache=False))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompt": 0}, ["request 7", "empty prompt"]),
        ({"max_tokens": 0}, ["request 7", "max_tokens must be at least 1"]),
        ({"stop": ((1,), ())}, ["empty stop sequence"]),
        ({"prompt": 90, "max_tokens": 11}, ["90 input and 11 output tokens", "101 together", "maximum is 100"]),
        ({"prompt": 60, "max_tokens": 22}, ["need 11 blocks of 8 tokens", "it has 10", "KV_CACHE_FRACTION"]),
    ],
)
def test_impossible_request_is_refused_with_the_numbers(request_, words):
    with pytest.raises(ConfigError) as refusal:
        check(**request_)
    text = str(refusal.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_prompt_longer_than_a_step_needs_chunked_prefill():
    whole = SchedulerLimits(max_batch_size=2, max_num_tokens=16, max_seq_len=100, chunked_prefill=False)
    check(prompt=16, limits=whole)
    check(prompt=17)
    with pytest.raises(ConfigError, match=r"a step computes 16: raise MAX_NUM_TOKENS to 17 or turn chunked prefill on"):
        check(prompt=17, limits=whole)


def test_exact_fit_is_accepted():
    check(prompt=60, max_tokens=21)  # the last token is not cached: 80 are
    check(prompt=90, max_tokens=10, blocks=13)


def sequence(length: int, left: int, **request) -> Sequence:
    return Sequence(
        request=Request(request_id=0, prompt=[1] * length, max_tokens=left, **request), token_ids=[1] * length
    )


def peak(lengths: list[tuple[int, int]]) -> int:
    """Return the peak number of tokens if each sequence grows by one a step until it ends, by simulation."""
    last = max(left for _, left in lengths)
    return max(sum(length + step for length, left in lengths if left >= step) for step in range(last + 1))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=2, max_size=8), st.integers(1, 300))
def test_admission_equals_simulated_peak_usage(lengths, blocks):
    """With blocks of one token nothing is rounded, so the estimate is exact."""
    admission = AdmissionCheck([sequence(*lengths[0])], blocks, block_tokens=1)
    admitted = lengths[:1]
    for candidate in lengths[1:]:
        fits = peak([*admitted, candidate]) <= blocks
        assert admission.try_admit(sequence(*candidate)) == fits
        if fits:
            admitted.append(candidate)


def test_single_sequence_is_always_admitted():
    assert AdmissionCheck([], 1, block_tokens=4).try_admit(sequence(100, 100))


def test_full_batch_whose_ends_fill_their_blocks_is_admitted():
    admission = AdmissionCheck([sequence(64, 64) for _ in range(15)], 32, block_tokens=64)
    assert admission.try_admit(sequence(64, 64))
    assert not admission.try_admit(sequence(64, 64))
    assert not admission.try_admit(sequence(1, 65))


def test_unknown_output_length_reserves_one_block():
    """A limit of 1,000 tokens that an end-of-sequence token will probably precede does not block other requests."""
    running = [sequence(10, 1000, eos=frozenset({2}))]
    assert AdmissionCheck(running, 10, block_tokens=8).try_admit(sequence(10, 1000, eos=frozenset({2})))
    assert not AdmissionCheck(running, 10, block_tokens=8).try_admit(sequence(10, 1000))


def test_cached_prefix_blocks_count_once():
    running, candidate = [sequence(40, 8)], sequence(40, 8)
    assert not AdmissionCheck(running, 10, block_tokens=8).try_admit(candidate)
    candidate.num_cached_blocks = 4
    assert AdmissionCheck(running, 10, block_tokens=8).try_admit(candidate)
