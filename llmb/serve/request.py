"""What a user asks for and what comes of it: Sampling, Request, Answer, and Sequence, which is a request under way."""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["length", "stop", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Equal seeds give equal answers, whatever else the engine computes beside them."""

    temperature: float = 0.0  # 0: always the most likely token
    top_k: int = 0  # only among so many of the most likely; 0: all
    top_p: float = 1.0  # only among the most likely that together have this probability
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A request that has ended, with what was generated until then."""

    number: int
    tokens: tuple[int, ...]
    finish: Finish


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, when to stop, and whom to tell. Callbacks are called in the engine's thread, between steps."""

    number: int  # unique among those the engine knows
    prompt: Tokens[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    eos: frozenset[int] = frozenset()  # tokens that end an answer, themselves included in it
    ignore_eos: bool = False
    stop: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that do
    on_token: Callable[[int, int], None] | None = None  # number, token: as soon as the host knows it
    on_end: Callable[[Answer], None] | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """A request under way. `tokens` are those whose values the host knows: the prompt and what was generated.

    The device may be one token ahead: `pending` counts tokens that are sampled, or will be by a step that is launched,
    but not read yet. `computed` counts tokens whose keys and values are in the cache once all launched steps are done.
    """

    request: Request
    tokens: list[int]
    computed: int = 0
    pending: int = 0
    slot: int | None = None  # its row in what the device keeps for each sequence; none while it waits
    blocks: list[int] = field(default_factory=list)  # of the cache, in the order of its tokens
    synced: int = 0  # blocks of these that the device's table has; 0 again when it gets a slot
    shared: int = 0  # of these, the first so many came from the prefix cache
    digests: list[bytes] = field(default_factory=list)  # names of its full blocks there, as far as they were needed
    finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens there are, the unread ones included."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        """Tokens of the answer, the unread ones included."""
        return self.length - len(self.request.prompt)
