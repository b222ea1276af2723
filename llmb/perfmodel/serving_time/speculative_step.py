"""Steps of the native engine with a draft model, and the speed-up that follows from an acceptance.

    speculation(setup, on, c).speedup      expected tokens of a step x plain step / (draft steps + verification)

A step emits 1 + p1 + p1 p2 + ... tokens of each request on average, where pi is the probability that draft i is
accepted after those before it. It costs the target's pass over all drafts, computed as so many decodes, and a pass of
the draft model for each of them, the first over two tokens of each request. Each pass is launched by the host, which
then waits: nothing of that is hidden behind other steps. Left out: fewer drafts at the end of an output.
"""

from dataclasses import dataclass, replace

from llmb.perfmodel.serving_time.native_step import SKINNY_TOKENS, NativeStep
from llmb.perfmodel.serving_time.serving_setup import ServingSetup, expected_tokens
from llmb.perfmodel.serving_time.serving_step import serving_rates
from llmb.perfmodel.serving_time.serving_work import serving_work
from llmb.perfmodel.step_time.cluster_fabric import Device
from llmb.perfmodel.step_time.fitted_constants import Constants


@dataclass(frozen=True, kw_only=True)
class SpeculativeStep(NativeStep):
    """Steps that propose and verify; `setup` names the drafts, `target` and `draft` compute without."""

    target: NativeStep
    draft: NativeStep

    def terms(
        self, *, decodes: float, context: float, prefill: float = 0.0, prompts: float = 0.0, pairs: float = 0.0,
        window_pairs: float = 0.0,
    ) -> dict[str, float]:  # fmt: skip
        """Return the seconds of all passes of a step by kind; prompts pass through both models."""
        drafts = self.setup.draft_tokens
        prompt = {"prefill": prefill, "pairs": pairs, "window_pairs": window_pairs}
        verification = self.target.terms(decodes=rows(decodes, 1 + drafts), context=context, prompts=prompts, **prompt)
        first = self.draft.terms(decodes=rows(decodes, 2), context=context, **prompt)
        total = {name: seconds + first[name] for name, seconds in verification.items()}
        if decodes and drafts > 1:
            further = self.draft.terms(decodes=decodes, context=context)
            total = {name: seconds + (drafts - 1) * further[name] for name, seconds in total.items()}
        return total

    def decode_graph(self, decodes: float) -> int:
        return self.target.decode_graph(rows(decodes, 1 + self.setup.draft_tokens))


def rows(decodes: float, tokens: int) -> float:
    """Return the rows of so many tokens of each request: more than skinny GEMMs take, which are for one of each."""
    return max(decodes * tokens, SKINNY_TOKENS + 1.0) if decodes else 0.0


def speculative_step(setup: ServingSetup, on: Device, c: Constants) -> SpeculativeStep:
    """Return the steps of a setup with a draft model."""
    assert setup.draft_alone is not None
    batch, plain = setup.max_batch_size, setup.without_drafts
    target = _native_step(replace(plain, max_batch_size=batch * (1 + setup.draft_tokens)), on, c)
    draft = _native_step(replace(setup.draft_alone, max_batch_size=2 * batch), on, c)
    return SpeculativeStep(**vars(target) | {"setup": setup, "target": target, "draft": draft})


def _native_step(setup: ServingSetup, on: Device, c: Constants) -> NativeStep:
    return NativeStep.of(setup, serving_work(setup), serving_rates(setup, on, c), on, c)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Expected gain of speculative decoding while `batch` requests decode."""

    batch: int
    tokens_per_step: float  # of a request
    plain_step_s: float
    draft_s: float  # all passes of the draft model before a verification
    verification_s: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_step * self.plain_step_s / (self.draft_s + self.verification_s)


def speculation(
    setup: ServingSetup, acceptance: tuple[float, ...], batch: int, on: Device, c: Constants
) -> Speculation:
    """Return the model of a setup's drafts at an acceptance, for decodes in the middle of their output."""
    steps, context = speculative_step(setup, on, c), setup.isl + setup.osl / 2
    both = sum(steps.terms(decodes=batch, context=context).values())
    verification = sum(steps.target.terms(decodes=rows(batch, 1 + setup.draft_tokens), context=context).values())
    plain = _native_step(setup.without_drafts, on, c)
    return Speculation(
        batch=batch,
        tokens_per_step=expected_tokens(acceptance),
        plain_step_s=sum(plain.terms(decodes=batch, context=context).values()),
        draft_s=both - verification,
        verification_s=verification,
    )
