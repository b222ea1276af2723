"""When an answer is complete: the token limit, an end-of-sequence token, or a stop sequence; all but the first early.

What ends an answer is part of it. A stop sequence counts only within the answer, never reaching back into the prompt.
"""

from collections.abc import Sequence as Tokens

from llmb.serve.request import Finish, Request


def ending(request: Request, tokens: Tokens[int]) -> Finish | None:
    """Why the answer ends with the newest of `tokens` (prompt and answer); none if it goes on."""
    if not request.ignore_eos and tokens[-1] in request.eos:
        return "stop"
    generated = len(tokens) - len(request.prompt)
    for stop in request.stop:
        if len(stop) <= generated and tuple(tokens[-len(stop) :]) == stop:
            return "stop"
    return "length" if generated >= request.max_tokens else None


def certain(request: Request) -> bool:
    """Whether only the token limit can end it, so that its length is known ahead."""
    return (request.ignore_eos or not request.eos) and not request.stop
