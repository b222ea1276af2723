"""Random token ids: equal for equal seeds on every machine, without numpy.

    TokenSampler(seed=1234, vocab=32000, eos=frozenset({2})).prompts([(128, 16), (96, 8)])

Tokens are uniform over the vocabulary without end-of-sequence tokens. No prompt of one sampler occurs twice while there
are others of its length, so that a prefix cache does not help.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from llmb.config.native.request_lengths import Lengths, prompt_random, sample_lengths
from llmb.config.spec import Inference

MAX_DRAWS = 100  # of one prompt, until a repeated one is accepted


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of the input, and the number of output tokens."""

    tokens: Sequence[int]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the finished sequence."""
        return len(self.tokens) + self.output_tokens


def random_tokens(random: Random, count: int, vocab: int, excluded: Sequence[int] = ()) -> "array[int]":
    """Sample token ids below `vocab` that are not among the excluded ones, which are in rising order."""
    choices = vocab - len(excluded)
    words = array("I", random.randbytes(4 * count))  # 32 random bits each: a thousand times faster than randrange
    tokens = [(word * choices) >> 32 for word in words]
    if excluded:
        first = excluded[0]
        tokens = [token if token < first else _past(token, excluded) for token in tokens]
    return array("i", tokens)


def _past(token: int, excluded: Sequence[int]) -> int:
    """Return the token moved up past the excluded ones, which are in rising order."""
    for gap in excluded:
        token += token >= gap
    return token


class TokenSampler:
    """Random lengths and prompts."""

    def __init__(self, seed: int, vocab: int, eos: frozenset[int] = frozenset()):
        self._random = prompt_random(seed)
        self._vocab = vocab
        self._eos = sorted(token for token in eos if 0 <= token < vocab)
        self._seen: set[bytes] = set()

    def lengths(self, work: Inference) -> Lengths:
        """Sample the lengths of a run's requests."""
        isl, osl = (work.isl, work.isl_spread), (work.osl, work.osl_spread)
        return sample_lengths(self._random, work.num_requests, isl, osl, work.lengths)

    def prompts(self, lengths: Iterable[tuple[int, int]]) -> list[Prompt]:
        """Sample new prompts of these (input, output) lengths."""
        return [Prompt(self._tokens(isl), osl) for isl, osl in lengths]

    def _tokens(self, count: int) -> Sequence[int]:
        for _ in range(MAX_DRAWS):
            tokens = random_tokens(self._random, count, self._vocab, self._eos)
            content = tokens.tobytes()
            if content not in self._seen:
                break
        self._seen.add(content)
        return tokens
