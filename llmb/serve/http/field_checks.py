"""Checks of single fields of a request body. A field that would change the output and has no effect here is refused."""

from difflib import get_close_matches
from typing import Any

from llmb.serve.http.openai_error import ApiError

MAX_CHOICES = 128  # outputs of one request
MAX_STOPS = 16
MAX_STOP_CHARS = 1000

GENERATION = (
    "model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "ignore_eos", "stream",
    "stream_options", "min_tokens",
)  # fmt: skip
COMPLETION = (*GENERATION, "prompt")
CHAT = (*GENERATION, "messages", "max_completion_tokens", "top_logprobs")
# Fields that never change an output.
WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "priority", "verbosity", "parallel_tool_calls",
}  # fmt: skip
# Fields that would change an output, and the values with which they do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


def refuse(field: str, problem: str, code: str | None = None) -> ApiError:
    """Return the error of a field, with its name first."""
    return ApiError(f"{field} {problem}", param=field, code=code)


def check_fields(fields: dict[str, Any], chat: bool) -> None:
    """Refuse unknown fields, and those that would need something that is not here."""
    valid = CHAT if chat else COMPLETION
    for name, value in fields.items():
        if name in valid or name in WITHOUT_EFFECT:
            continue
        if name not in NEUTRAL_VALUES:
            nearest = get_close_matches(name, valid, n=1)
            hint = f" (did you mean {nearest[0]}?)" if nearest else ""
            raise refuse(name[:60], f"is not a field of this request{hint}", "unknown_field")
        if value not in NEUTRAL_VALUES[name]:
            raise refuse(name, "is not supported; leave it out", "unsupported_field")


def read_int(fields: dict[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """Return an integer within its limits; None: left out."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise refuse(name, f"must be an integer {limits}")
    return value


def read_number(fields: dict[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a number within its limits; None: left out."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not low <= value <= high:
        raise refuse(name, f"must be a number from {low:g} to {high:g}")
    return float(value)


def read_bool(fields: dict[str, Any], name: str) -> bool:
    """Return a truth value; left out means false."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise refuse(name, "must be true or false")
    return value


def read_stop(stop: Any) -> list[str]:
    """Return the stop strings of a string or a list of strings."""
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise refuse("stop", "must be a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in stops):
        raise refuse("stop", f"may hold {MAX_STOPS} strings of {MAX_STOP_CHARS} characters at most")
    return stops


def read_stream_options(options: Any, stream: bool) -> tuple[bool, bool]:
    """Return whether the stream ends with a chunk of usage, and whether every chunk has it."""
    if options is None:
        return False, False
    if not stream:
        raise refuse("stream_options", "needs stream: true")
    names = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if not isinstance(options, dict) or options.keys() - names:
        raise refuse("stream_options", "may hold include_usage and continuous_usage_stats only")
    include_usage = read_bool(options, "include_usage")
    return include_usage, include_usage and read_bool(options, "continuous_usage_stats")


def check_min_tokens(fields: dict[str, Any], ignore_eos: bool, stops: list[str]) -> None:
    """Refuse a least number of tokens unless nothing but max_tokens can end the output."""
    min_tokens = read_int(fields, "min_tokens", 0) or 0
    if min_tokens and (stops or not ignore_eos):
        raise refuse("min_tokens", "is supported with ignore_eos: true and without stop only", "unsupported_field")
