"""Lengths of the requests of a serving run, as its prompts are sampled: the same numbers wherever they are needed.

run_lengths(config.workload)      -> ((1012, 96), ...): input and output tokens of every request, in order
"""

from random import Random
from typing import Literal

from llmb.config.spec import Inference
from llmb.errors import ConfigError

Lengths = tuple[tuple[int, int], ...]
Distribution = Literal["fixed", "normal", "uniform"]


def prompt_random(seed: int) -> Random:
    """Return the generator of a run's lengths, which come first, and of its prompts."""
    return Random(f"prompts {seed}")


def sample_length(random: Random, mean: int, spread: float, kind: str) -> int:
    """Sample a length; spread is the standard deviation (normal) or half the range (uniform)."""
    if kind == "normal":
        return max(1, round(random.gauss(mean, spread)))
    if kind == "uniform":
        return max(1, random.randint(round(mean - spread), round(mean + spread)))
    return max(1, mean)


def sample_lengths(
    random: Random, count: int, isl: tuple[int, float], osl: tuple[int, float], kind: Distribution
) -> Lengths:
    """Sample input and output tokens of requests, first all inputs; of both a mean and a spread are given."""
    inputs, outputs = ([sample_length(random, *length, kind) for _ in range(count)] for length in (isl, osl))
    return tuple(zip(inputs, outputs, strict=True))


def check_spread(name: str, length: int, spread: float, kind: Distribution) -> None:
    """Refuse a spread of fixed lengths, and one that makes a request empty."""
    if spread and kind == "fixed":
        raise ConfigError(f"{name}_spread has no effect with lengths=fixed; set lengths=normal or lengths=uniform")
    if spread >= length:
        raise ConfigError(f"{name}_spread {spread:g} must be less than {name} {length}: no request is empty")


def run_lengths(work: Inference) -> Lengths:
    """Return the lengths of a run's requests where they vary; of one length, and of a file's requests, none."""
    isl, osl = (work.isl, work.isl_spread), (work.osl, work.osl_spread)
    if work.lengths == "fixed" or not (work.isl_spread or work.osl_spread) or work.dataset is not None:
        return ()
    check_spread("isl", *isl, work.lengths)
    check_spread("osl", *osl, work.lengths)
    return sample_lengths(prompt_random(work.seed), work.num_requests, isl, osl, work.lengths)
