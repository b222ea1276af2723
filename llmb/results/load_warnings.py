"""Warnings of a load on a server: what the client did wrong, what the server did not do as asked."""

from collections.abc import Iterable, Sequence

from llmb.config.load_settings import LoadSettings
from llmb.events import Event, RequestDone
from llmb.perfmodel import load_metrics
from llmb.results.load_figures import client_facts
from llmb.results.recorded_events import completed_requests

FULL_TIMES = 2  # how often the requests should fill the concurrency
RATE_TOLERANCE = 0.05  # of the time that the arrivals were meant to take
INPUT_TOLERANCE = 0.1  # of the input tokens
TEMPLATE_TOKENS = 32  # that a chat template may add
USUAL_HITS = 0.5  # of the input tokens, where nobody knows how many the requests share
BUSY_LIMIT = 0.9  # of a core


def load_cautions(
    load: LoadSettings, measured: Sequence[RequestDone], fields: dict, events: Sequence[Event]
) -> Iterable[tuple[str, str]]:
    """Yield every warning that applies."""
    completed = completed_requests(events)
    yield from _about_client(load, completed, events)
    failed = [r for r in measured if r.error is not None]
    if failed:
        example = f"the first: request {failed[0].request}: {failed[0].error}"
        yield "FAILED_REQUESTS", f"{len(failed)} of {len(measured)} requests failed and are left out; {example}"
    if wrong := fields.get("lengths_wrong"):
        text = f"{wrong} of {len(completed)} outputs do not have the requested length: figures per token are not "
        yield "WRONG_LENGTHS", text + "comparable; does the server honour ignore_eos and max_tokens?"
    yield from _about_inputs(load, completed)
    yield from _about_cache(completed, fields)
    if fields.get("tokens_counted_by") == "chunks":
        yield "NO_USAGE", "the server reports no usage: chunks are counted as tokens; give --tokenizer to count them"
    if fields.get("tokens_counted_by") and fields.get("output_tokens") is None:
        yield "NO_USAGE", "the server reports no usage: output tokens are unknown; give --tokenizer to count them"
    if wrong := fields.get("token_counts_wrong"):
        yield (
            "TOKEN_COUNTS_DIFFER",
            f"the tokenizer counts {wrong} of {len(completed)} outputs otherwise than the server",
        )
    if load.concurrency is not None and not load.is_open_loop and len(measured) < FULL_TIMES * load.concurrency:
        hint = f"--requests {FULL_TIMES * load.concurrency}"
        yield (
            "FEW_REQUESTS",
            f"{len(measured)} requests for {load.concurrency} at a time: ramp-up and drain weigh much; {hint}",
        )
    due = [r.scheduled for r in measured if r.scheduled is not None]
    if load.is_open_loop and len(due) == len(measured) > 1:
        planned_s, sent_s = max(due) - min(due), max(r.arrival for r in measured) - min(r.arrival for r in measured)
        if planned_s and sent_s > (1 + RATE_TOLERANCE) * planned_s:
            held = " (the cap held requests back)" if load.concurrency is not None else ""
            text = f"{(len(due) - 1) / sent_s:.4g} of {(len(due) - 1) / planned_s:.4g} requests/s were sent{held}"
            yield "RATE_MISSED", f"{text}; look at the scheduled-time latency"


def _about_inputs(load: LoadSettings, completed: Sequence[RequestDone]) -> Iterable[tuple[str, str]]:
    """Compare the input tokens that the server counts with --isl, where all requests have about as many."""
    has_isl = load.lengths != "empirical" and load.dataset is None and load.trace is None and load.turns == 1
    if not has_isl or not completed:
        return
    mean = sum(r.input_tokens for r in completed) / len(completed)
    if abs(mean - load.isl) > INPUT_TOLERANCE * load.isl + TEMPLATE_TOKENS:
        remedy = "give --tokenizer FOLDER, or send token ids (--prompts ids)"
        yield "WRONG_INPUT_LENGTHS", f"prompts have {mean:.0f} tokens on average instead of {load.isl}; {remedy}"


def _about_cache(completed: Sequence[RequestDone], fields: dict) -> Iterable[tuple[str, str]]:
    """Compare the hits of the server's prefix cache with what these requests share; a template they all share."""
    rate, possible = fields.get("prefix_hit_rate"), fields.get("prefix_hit_rate_possible")
    if rate is None or not completed:
        return
    mean = sum(r.input_tokens for r in completed) / len(completed)
    if (rate - (USUAL_HITS if possible is None else possible)) * mean > INPUT_TOLERANCE * mean + TEMPLATE_TOKENS:
        shared = "" if possible is None else f", though these requests share {100 * possible:.0f} %"
        text = f"{100 * rate:.0f} % of the input tokens came from the server's prefix cache{shared}"
        yield "PREFIX_CACHED", f"{text}: earlier loads sent the same prompts; change the seed or empty the cache"


def _about_client(
    load: LoadSettings, completed: Sequence[RequestDone], events: Sequence[Event]
) -> Iterable[tuple[str, str]]:
    moved = client_moved(load, completed, events)
    if moved is not None:
        name, fraction = moved
        remedy = "raise --processes, run the client on another machine or lower the load"
        yield (
            "CLIENT_LATE",
            f"the client itself moves {name} by {100 * fraction:.0f} %: no verdict on the server; {remedy}",
        )
    client = client_facts(events)
    if client is not None and client.cpu_fraction is not None and client.cpu_fraction > BUSY_LIMIT:
        percent = 100 * client.cpu_fraction
        yield "CLIENT_BUSY", f"a client process was busy {percent:.0f} % of the time; raise --processes"


def client_moved(
    load: LoadSettings, completed: Sequence[RequestDone], events: Sequence[Event]
) -> tuple[str, float] | None:
    """Return the percentile that the client moves by more than it may; None: it is honest, or nothing is known."""
    client = client_facts(events)
    has_cap = load.concurrency is not None and load.is_open_loop
    moved = load_metrics.moved_percentile(completed, client.loop_lag_ms if client else None, has_cap)
    return moved if moved is not None and moved[1] > load_metrics.MOVED_LIMIT else None
