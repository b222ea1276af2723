"""What is a secret, and how it is kept out of every file: masked in settings, scrubbed from text.

    mask({"HF_TOKEN": "hf_...", "TP": "2"}) -> {"HF_TOKEN": "***", "TP": "2"}
    scrub("login with hf_...") -> "login with ***"
    scrub_named("DB_PASSWORD=hunter2") -> "DB_PASSWORD=***"

A secret is known by the name of its variable or by its own shape. In doubt a value is masked: a hidden path costs
nothing, a published token does. Logs are scrubbed line by line of known values and shapes; what leaves the machine goes
through `scrub_thoroughly`, which also reads the names that stand before values.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import itemgetter

MASK = "***"
SHORTEST_SCRUBBED = 6  # characters; words like "true" or "1" under a secret's name must not be cut out of a log

_NAME = re.compile(r"TOKEN$|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTHORIZATION$", re.IGNORECASE)
_SHAPE = re.compile(
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}"  # OpenAI and its like; "risk-..." is an ordinary word
    r"|nvapi-[A-Za-z0-9_-]{20,}"  # NVIDIA
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}"  # GitHub, GitLab
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{35}|dckr_pat_[A-Za-z0-9_-]{20,}"  # Slack, Google, Docker
    r"|eyJ[A-Za-z0-9_-]{10,1000}+\.[A-Za-z0-9_-]{10,}+\.[A-Za-z0-9_-]{10,}"  # JSON web token
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{16,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)|(?<=://)[A-Za-z0-9_-]{20,}(?=@)"  # user:password@ or token@ in an address
)

# In small letters, what each of the shapes has: looking for words is far quicker than looking for shapes.
_SHAPE_HINTS = (
    "hf_", "sk-", "nvapi-", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox",
    "aiza", "dckr_pat_", "eyj", "bearer ", "://",
)  # fmt: skip
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,20}PRIVATE KEY[A-Z ]{0,10}-----(?:[^-]|-(?!----))*"  # to its end, or as far as it goes
    r"(?:-----END [A-Z0-9 ]{0,20}PRIVATE KEY[A-Z ]{0,10}-----)?"
)

# The end of a name in running text: `key` alone must end it, as num_key_value_heads is none, but KEY may stand anywhere
# in a name that is all capitals, as that of a variable is.
_SURE = r"(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)[\w-]{0,40}"
_ENDING = rf"(?:{_SURE}|TOKEN|KEY|KEY[_-]?ID|AUTHORIZATION|(?-i:KEY[A-Z0-9_]{{0,40}}))"
_VALUE = (
    r"(?:\\+\"[^\"\\\n]*\\+\""  # \"...\" of JSON inside JSON
    r"|\"(?:\\.|[^\"\\\n])*\""
    r"|\$?'(?:\\.|[^'\\\n])*'(?:\"'\"'(?:\\.|[^'\\\n])*')*"  # as Python and the shell quote
    r"|(?:(?:Bearer|Basic) )?(?![\[{(<])(?:\\.|[^\s\"',;&)}\]\\])+)"
)
_NAMED = re.compile(rf"(?P<name>{_ENDING})(?P<between>\\*[\"']?[ \t]*(?:=>|[:=])[ \t]*)(?P<value>{_VALUE})", re.I)
_FLAG = re.compile(
    rf"(?P<name>--[\w-]{{0,60}}?{_ENDING})(?P<between>[ \t]+(?!-)|[\"'],\s*(?=[\"']))(?P<value>{_VALUE})", re.I
)
# A whole line as `env` prints it: its value may hold anything. Also `export NAME=...` and `declare -x NAME=...`.
_LINE = re.compile(
    rf"^(?P<name>(?:export |declare -x |\+ )?\w{{0,64}}?{_ENDING})(?P<between>=)(?P<value>.+)$", re.I | re.M
)
_NAME_HINTS = ("token", "key", "secret", "passw", "passphrase", "credential", "authorization")
_NAME_HINT = re.compile(
    r"(?:token|key[\w-]{0,41}|authorization|(?:secret|passw|passphrase|credential)[\w-]{0,45})[\\\"']*[ \t]*[:=]"
)
_NAME_IN_TEXT = re.compile(rf"{_ENDING}$", re.I)
_PLAIN_WORD = re.compile(r"true|false|none|null|yes|no|\**", re.I)
_FIGURE = re.compile(r"[-+]?[\d.]{1,20}(?:e[-+]?\d+)?[a-z%/]{0,4}", re.I)
_DENSE = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+/=]{20,}")  # what no ordinary word looks like


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable must not be written down."""
    return bool(_NAME.search(name) or _SHAPE.search(value) or _KEY_BLOCK.search(value))


def mask(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, fit to be written: secret values replaced."""
    return {name: MASK if is_secret(name, value) else value for name, value in environment.items()}


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """What to scrub besides shapes: each line of a secret value, as it is and as Python or JSON prints it."""
    lines = (line for name, value in environment.items() if is_secret(name, value) for line in value.splitlines())
    forms = {form for line in lines for form in (line, repr(line)[1:-1], json.dumps(line)[1:-1])}
    return longest_first(form for form in forms if len(form) >= SHORTEST_SCRUBBED)


def longest_first(values: Iterable[str]) -> list[str]:
    """In the order to scrub them: one that is part of another must not spoil it."""
    return sorted(set(values), key=lambda value: (-len(value), value))


def scrub(text: str, values: Iterable[str] = ()) -> str:
    """Text without secrets: those given, longest first, and all that have a secret's shape."""
    for value in values:
        text = text.replace(value, MASK)
    return _in_lines(_KEY_BLOCK.sub(MASK, text), _may_have_shape, lambda lines: _SHAPE.sub(MASK, lines))


def scrub_named(text: str) -> str:
    """Text without the values that stand after a secret's name; quotes stay, so that JSON and YAML stay readable."""
    return _in_lines(text, _may_have_name, _mask_named)


def scrub_thoroughly(text: str, values: Iterable[str] = ()) -> str:
    """Until nothing more is found: a mask put in may lay bare a shape that a letter before it had hidden."""
    values = list(values)
    while (cleaned := scrub_named(scrub(text, values))) != text:
        text = cleaned
    return text


def is_named_secret(name: str, value: str) -> bool:
    """Whether a value of running text must go for the name before it; `first_token: 12.5ms` is a figure and stays."""
    if not _NAME_IN_TEXT.search(name) or _PLAIN_WORD.fullmatch(value):
        return False
    return name.isupper() or not _FIGURE.fullmatch(value) or bool(re.search(_SURE, name, re.I))


def values_named_in(text: str) -> set[str]:
    """Values under a secret's name that are long and without sense: secrets wherever else they stand, too."""
    found: set[str] = set()

    def note(lines: str) -> str:
        for pattern in (_NAMED, _FLAG):
            found.update(match["value"].strip("\\\"'$") for match in pattern.finditer(lines))
        return lines

    _in_lines(text, _may_have_name, note)
    return {value for value in found if _DENSE.fullmatch(value)}


def _in_lines(text: str, may_need: Callable[[str], bool], clean: Callable[[str], str]) -> str:
    """Clean only lines that may need it and those after them, as a list of arguments may be written over two."""
    lines = text.split("\n")
    marks = [may_need(line.lower()) for line in lines]
    if not any(marks):
        return text
    near = (here or before for here, before in zip(marks, [False, *marks], strict=False))
    blocks = (
        (marked, "\n".join(line for _, line in group))
        for marked, group in groupby(zip(near, lines, strict=True), key=itemgetter(0))
    )
    return "\n".join(clean(block) if marked else block for marked, block in blocks)


def _may_have_shape(line: str) -> bool:
    return any(hint in line for hint in _SHAPE_HINTS)


def _may_have_name(line: str) -> bool:
    return any(hint in line for hint in _NAME_HINTS) and ("--" in line or bool(_NAME_HINT.search(line)))


def _mask_named(text: str) -> str:
    for pattern in (_NAMED, _FLAG, _LINE):
        text = pattern.sub(_masked, text)
    return text


def _masked(match: re.Match[str]) -> str:
    name, between, value = match["name"], match["between"], match["value"]
    hidden = is_named_secret(name, value.strip("\\\"'$"))
    return name + between + _quoted_as(value, between) if hidden else match[0]


def _quoted_as(value: str, between: str) -> str:
    """The mask in the quotes its value had; a bare one after a colon gets some, as bare asterisks are no YAML."""
    if value.startswith("\\"):
        quote = re.match(r"\\+\"", value)
        return f"{quote[0]}{MASK}{quote[0]}" if quote and value.endswith(quote[0]) else MASK
    if value[0] in "\"'" and value.endswith(value[0]) and len(value) > 1:
        return f"{value[0]}{MASK}{value[0]}"
    if '"' in between:
        return f'"{MASK}"'
    return f"'{MASK}'" if ":" in between else MASK
