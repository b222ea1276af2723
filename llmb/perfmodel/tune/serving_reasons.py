"""Why one serving setting is faster than another: the settings that differ, and the parts of a request that change."""

from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.tune.layout_reasons import term_changes
from llmb.perfmodel.tune.serving_candidate import ServingCandidate

FIELDS = ("tp", "pp", "attention_dp", "ep", "max_num_tokens", "max_batch_size", "concurrency")
NOTICEABLE = 0.01  # of TPOT or TTFT, to be named as a reason
MS = 1e3


def serving_changes(before: ServingSetup, after: ServingSetup) -> dict[str, tuple[int, int]]:
    """Return the searched settings that differ, with both values."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in FIELDS}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def token_changes(before: ServingCandidate, after: ServingCandidate) -> dict[str, float]:
    """Return the changes of GPU milliseconds per output token, by kind of work, largest first.

    A decode step emits a token for every request of its batch, and the prefill of a request is shared by its tokens.
    """
    return term_changes(_per_token(before), _per_token(after), NOTICEABLE)


def _per_token(candidate: ServingCandidate) -> dict[str, float]:
    """Return GPU milliseconds per output token: decode by kind of work, prefill, and waiting that leaves GPUs idle."""
    setup, p = candidate.setup, candidate.prediction
    batch = max(1.0, p.batch)
    parts = {f"decode {name}": MS * seconds * setup.gpus / batch for name, seconds in p.terms["decode_step"].items()}
    parts["prefill"] = MS * sum(p.terms["prefill"].values()) * setup.gpus / setup.osl / setup.attention_dp
    total = MS / p.output_tokens_per_s_per_gpu
    return parts | {"idle and overlap": total - sum(parts.values())}
