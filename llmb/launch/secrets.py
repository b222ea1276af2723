"""Secrets are kept out of every file: masked in settings, scrubbed from text.

    mask({"HF_TOKEN": "hf_...", "TP": "2"}) -> {"HF_TOKEN": "***", "TP": "2"}
    scrub("login with hf_...") -> "login with ***"
    scrub_named("DB_PASSWORD=hunter2") -> "DB_PASSWORD=***"

A secret is recognized by the name of its variable, by its own pattern, or by its entropy. In doubt a value is masked:
a hidden path costs nothing, a published token does. Logs are scrubbed line by line of values and patterns; files that
leave the machine go through `scrub_thoroughly`, which also recognizes values by the names before them.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from math import log2
from operator import itemgetter

MASK = "***"
MIN_ENTROPY_BITS = 4.3  # of a character; 32 random letters and digits have 4.6, hexadecimal ones and words below 4
MIN_SECRET_CHARS = 6  # words like "true" or "1" under a secret's name must not be scrubbed from a log

_SECRET_NAME = re.compile(
    r"TOKEN$|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTHORIZATION$"
    r"|PASSCODE$|(?:^|_)PW$|(?<!BY)PASS$|AUTHS?$|COOKIES?$|CREDS$|SIG$"
    r"|(?<!^)(?<!^OLD)PWD$",  # PWD and OLDPWD are the shell's
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}"  # OpenAI and the like; "risk-..." is an ordinary word
    r"|nvapi-[A-Za-z0-9_-]{20,}"  # NVIDIA
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}"  # GitHub, GitLab
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{35}|dckr_pat_[A-Za-z0-9_-]{20,}"  # Slack, Google, Docker
    r"|eyJ[A-Za-z0-9_-]{10,1000}+\.[A-Za-z0-9_-]{10,}+\.[A-Za-z0-9_-]{10,}"  # JSON web token
    r"|(?<=://)[^/\s:@]{0,200}:(?!\d+(?:/|\s|$))[^\s@]{1,200}(?=@)"  # user:password@ in an address
    r"|(?<=://)[A-Za-z0-9_-]{20,}(?=@)"  # token@
)
# A secret after something that says what it is, which stays.
_LABELLED = re.compile(
    r"(?P<label>(?i:bearer)\s{1,3})[A-Za-z0-9._~+/=-]{16,}"
    r"|(?P<basic>(?i:\bbasic)\s{1,3})(?=[A-Za-z+/]*[0-9=])[A-Za-z0-9+/]{8,}={0,2}"  # user:password in base 64
    r"|(?P<header>(?i:authorization)\W{1,6}(?i:bearer|basic|token|apikey)\s{1,3})[A-Za-z0-9._~+/=-]{6,}"
    r"|(?P<signature>(?i:\bsig|-signature|[?&]signature)=)[A-Za-z0-9%+/=_-]{16,}"  # shared access, presigned address
    r"|(?P<docker>\\{0,3}\"auth\\{0,3}\"\s{0,3}:\s{0,3}\\{0,3}\")[A-Za-z0-9+/=_-]{8,}"  # Docker's config.json
    r"|(?P<netrc>\b(?:login\s{1,9}\S{1,200}\s{1,9}(?:account\s\S{1,200}\s{1,9})?|machine\s\S{1,200}\s{1,9})password\s{1,9})\S+"
    r"|(?P<curl>(?:(?:^|\s)(?:-[uU]|--(?:proxy-)?user)(?:\s+|=)|\bcurl\b[^\n]{0,200}?\s-[uU])[\"']?)"
    r"(?!\d+:\d+\b)[^\s:\"'/-][^\s:\"'/]{0,200}:[^\s\"']+"
    r"|(?P<connection>(?:(?i:password|passwd)|[Pp]wd|;\s?PWD|AccountKey|AccessKey)\s?=\s?)"
    r"(?:'[^'\n]{3,}'|\"[^\"\n]{3,}\"|[^;&\s\"'*][^;&\s\"']{2,})"
)

# A lower-case substring of each pattern: searching for substrings is far faster than for patterns.
_TOKEN_HINTS = (
    "hf_", "sk-", "nvapi-", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox",
    "aiza", "dckr_pat_", "eyj", "bearer", "basic ", "authorization", "://", "sig=", "signature=", '"auth', "login ",
    "machine ", "-u", "--user", "--proxy-user", "passw", "pwd", "accountkey", "accesskey",
)  # fmt: skip
# The same of single services and commands, in patterns of their own: few lines have any of these hints.
_SERVICE_TOKEN = re.compile(
    r"gl(?:pat|rt|ptt|dt|cbt|ft|soat)-[A-Za-z0-9_-]{20,}"  # GitLab
    r"|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|api_org_[A-Za-z0-9]{20,}"  # npm, PyPI, Hugging Face
    r"|hv[sb]\.[A-Za-z0-9_-]{20,}|\.atlasv1\.[A-Za-z0-9_-]{40,}|dapi[0-9a-f]{32}"  # HashiCorp, Databricks
    r"|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}"  # Google
    r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"  # SendGrid
    r"|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|dop_v1_[0-9a-f]{32,}|shp(?:at|ca|pa|ss)_[0-9a-f]{32}"  # Stripe and others
    r"|AGE-SECRET-KEY-1[A-Z0-9]{20,}|MUNGE:[A-Za-z0-9+/=]{20,}|(?<!\d)\d{8,10}:AA[A-Za-z0-9_-]{33}"  # Telegram
    r"|(?<=hooks\.slack\.com/services/)[\w/-]{10,}|(?<=/api/webhooks/)[\w/-]{10,}|(?<=/webhookb2/)[\w/@-]{10,}"
)
_SERVICE_LABELLED = re.compile(
    r"(?P<digest>(?i:authorization)\W{1,6}(?i:digest)\s{1,3}|(?i:\bcookie)\s?:\s?)[^\n\"']{8,}(?:\"[^\n\"]{0,200}\"[^\n\"]{0,200}){0,9}"
    r"|(?P<query>[?&](?i:(?:access_|auth_)?token|api_?key|auth)=)[^\s&\"']{6,}"
    r"|(?P<registry>\\{0,3}\"(?:password|identitytoken|registrytoken)\\{0,3}\"\s{0,3}:\s{0,3}\\{0,3}\")[^\"\\\n]{3,}"
    r"|(?P<login>\b(?:docker|podman|helm|skopeo)\s{1,9}(?:registry\s{1,9})?login\b[^\n]{0,200}?\s(?:-p|--password)(?:\s{1,9}|=))\S+"
    r"|(?P<wandb>\bwandb\s{1,9}login\s{1,9}(?:--\S{1,200}\s{1,9}){0,9})[0-9A-Za-z_-]{40,}"
    r"|(?P<sshpass>\bsshpass\s{1,9}-p\s{0,9})\S+|(?P<mysql>\bmysql(?:dump|admin)?\s[^\n]{0,200}?(?<=\s)-p)[^\s=]\S*"
    r"|(?P<kubernetes>\bclient-key-data:\s{1,9})[A-Za-z0-9+/=]{16,}"
    r"|(?P<oracle>\bjdbc:oracle:thin:[^/\s]{1,100}/)[^@\s]{1,200}(?=@)"
)
_SERVICE_HINTS = (
    "glrt-", "glptt-", "gldt-", "glcbt-", "glft-", "glsoat-", "npm_", "pypi-", "api_org_", "hvs.", "hvb.", "atlasv1",
    "dapi", "ya29.", "gocspx-", "sg.", "k_live_", "k_test_", "dop_v1_", "shpat_", "shpca_", "shppa_", "shpss_",
    "age-secret-key", "munge:", ":aa", "slack.com/s", "webhook", "digest ", "cookie", "token=", "key=", "auth=",
    '"passw', "itytoken", "rytoken", " login", "sshpass", "mysql", "client-key-data", "jdbc:oracle",
)  # fmt: skip
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,20}PRIVATE KEY[A-Z ]{0,10}-----(?:[^-]|-(?!----))*"  # up to END or all of it
    r"(?:-----END [A-Z0-9 ]{0,20}PRIVATE KEY[A-Z ]{0,10}-----)?"
    r"|(?<=Private-Lines: )\d+(?:\s+[A-Za-z0-9+/=]+)+"  # of PuTTY
)

# The end of a secret's name in running text: lower-case `key` only as its end, as num_key_value_heads is no secret, but
# KEY anywhere in an upper-case name such as that of a variable.
_SECRET_WORD = r"(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)[\w-]{0,40}"
_NAME_END = (
    rf"(?:{_SECRET_WORD}|TOKEN|KEY|KEY[_-]?ID|AUTHORIZATION|(?-i:KEY[A-Z0-9_]{{0,40}}|_(?:PASS|PWD|AUTH|COOKIE|SIG)))"
)
_VALUE = (
    r"(?:\\+\"[^\"\\\n]*\\+\""  # \"...\" of JSON inside JSON
    r"|\"(?:\\.|[^\"\\\n])*\""
    r"|\$?'(?:\\.|[^'\\\n])*'(?:\"'\"'(?:\\.|[^'\\\n])*')*"  # as quoted by Python and the shell
    r"|(?:(?:Bearer|Basic) )?(?![\[{(<])(?:\\.|[^\s\"',;&)}\]\\])+)"
)
_ASSIGNMENT = re.compile(
    rf"(?P<name>{_NAME_END})(?P<between>\\*[\"']?[ \t]*(?:=>|[:=])[ \t]*)(?P<value>{_VALUE})", re.I
)
_FLAG = re.compile(
    rf"(?P<name>--[\w-]{{0,60}}?{_NAME_END})(?P<between>[ \t]+(?!-)|[\"'],\s*(?=[\"']))(?P<value>{_VALUE})", re.I
)
# A whole line as printed by `env`: its value may hold anything. Also `export NAME=...` and `declare -x NAME=...`.
_ENV_LINE = re.compile(
    rf"^(?P<name>(?:export |declare -x |\+ )?\w{{0,64}}?{_NAME_END})(?P<between>=)(?P<value>.+)$", re.I | re.M
)
_NAME_HINTS = (
    "token", "key", "secret", "passw", "passphrase", "credential", "authorization", "_pass", "_pwd", "_auth", "_cookie",
    "_sig",
)  # fmt: skip
_NAME_HINT = re.compile(
    r"(?:token|key[\w-]{0,41}|authorization|_(?:pass|pwd|auth|cookie|sig)"
    r"|(?:secret|passw|passphrase|credential)[\w-]{0,45})[\\\"']*[ \t]*[:=]"
)
_SECRET_NAME_IN_TEXT = re.compile(rf"{_NAME_END}$", re.I)
_PLAIN_WORD = re.compile(r"true|false|none|null|yes|no|\**", re.I)
_NUMBER = re.compile(r"[-+]?[\d.]{1,20}(?:e[-+]?\d+)?[a-z%/]{0,4}", re.I)
_RANDOM = re.compile(r"(?!/|GPU-|MIG-)(?=[^0-9]*[0-9])(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9+/=_-]{32,}")
_HIGH_ENTROPY = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+/=]{20,}")  # unlike any ordinary word


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable must not be written to a file."""
    return bool(_SECRET_NAME.search(name)) or _has_pattern(value) or looks_random(value)


def _has_pattern(value: str) -> bool:
    return scrub_named(scrub(value)) != value


def looks_random(value: str) -> bool:
    """Return whether a value has as many bits per character as a generated secret: no word, path or UUID has."""
    if not _RANDOM.fullmatch(value):
        return False
    frequencies = (count / len(value) for count in Counter(value).values())
    return -sum(frequency * log2(frequency) for frequency in frequencies) >= MIN_ENTROPY_BITS


def hidden_by_entropy(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that are masked for no other reason than how random their value looks."""
    named = (name for name, value in environment.items() if looks_random(value))
    return [name for name in named if not (_SECRET_NAME.search(name) or _has_pattern(environment[name]))]


def mask_random_argument(argument: str) -> str:
    """Return VALUE, NAME=VALUE or --OPTION=NAME=VALUE of a command line with a value masked that looks random."""
    *names, value = argument.split("=", 2 if argument.startswith("--") else 1)
    return "=".join([*names, MASK]) if looks_random(value) else argument


def mask(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the same variables with secret values masked."""
    return {name: MASK if is_secret(name, value) else value for name, value in environment.items()}


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values to scrub besides patterns: each line of a secret, as it is and as repr and JSON print it."""
    lines = (line for name, value in environment.items() if is_secret(name, value) for line in value.splitlines())
    spellings = {text for line in lines for text in (line, repr(line)[1:-1], json.dumps(line)[1:-1])}
    return longest_first(text for text in spellings if len(text) >= MIN_SECRET_CHARS)


def longest_first(values: Iterable[str]) -> list[str]:
    """Sort values for scrubbing: a substring of another comes after it."""
    return sorted(set(values), key=lambda value: (-len(value), value))


def scrub(text: str, values: Iterable[str] = ()) -> str:
    """Return text without these values, longest first, and without all that match a token pattern."""
    for value in values:
        text = text.replace(value, MASK)
    text = _scrub_lines(_PRIVATE_KEY.sub(MASK, text), _TOKEN_HINTS, partial(_mask_tokens, _TOKEN, _LABELLED))
    return _scrub_lines(text, _SERVICE_HINTS, partial(_mask_tokens, _SERVICE_TOKEN, _SERVICE_LABELLED))


def _mask_tokens(token: re.Pattern[str], labelled: re.Pattern[str], text: str) -> str:
    return labelled.sub(lambda match: next(filter(None, match.groups())) + MASK, token.sub(MASK, text))


def scrub_named(text: str) -> str:
    """Return text without the values after a secret's name; quotes stay, so that JSON and YAML stay valid."""
    return _scrub_lines(text, _NAME_HINTS, _mask_named, _may_hold_name)


def scrub_thoroughly(text: str, values: Iterable[str] = ()) -> str:
    """Scrub repeatedly until nothing changes: a mask may expose a pattern that a character before it had hidden."""
    values = list(values)
    while (cleaned := scrub_named(scrub(text, values))) != text:
        text = cleaned
    return text


def is_named_secret(name: str, value: str) -> bool:
    """Return whether a value is a secret by the name before it; `first_token: 12.5ms` is a number and stays."""
    if not _SECRET_NAME_IN_TEXT.search(name) or _PLAIN_WORD.fullmatch(value):
        return False
    return name.isupper() or not _NUMBER.fullmatch(value) or bool(re.search(_SECRET_WORD, name, re.I))


def values_named_in(text: str) -> set[str]:
    """Return high-entropy values after a secret's name: to be scrubbed wherever else they occur, too."""
    values: set[str] = set()

    def collect(lines: str) -> str:
        for pattern in (_ASSIGNMENT, _FLAG):
            values.update(match["value"].strip("\\\"'$") for match in pattern.finditer(lines))
        return lines

    _scrub_lines(text, _NAME_HINTS, collect, _may_hold_name)
    return {value for value in values if _HIGH_ENTROPY.fullmatch(value)}


def _scrub_lines(
    text: str, hints: Iterable[str], clean: Callable[[str], str], may_hold: Callable[[str], bool] = bool
) -> str:
    """Clean only lines that may hold a secret and those after them, as a list of arguments may span two."""
    lowered = text.lower()
    present = [hint for hint in hints if hint in lowered]  # most are nowhere: one look at all lines tells
    if not present:
        return text
    lines = text.split("\n")
    suspect = [any(hint in line for hint in present) and may_hold(line) for line in lowered.split("\n")]
    if not any(suspect):
        return text
    selected = (this or previous for this, previous in zip(suspect, [False, *suspect], strict=False))
    blocks = (
        (is_selected, "\n".join(line for _, line in group))
        for is_selected, group in groupby(zip(selected, lines, strict=True), key=itemgetter(0))
    )
    return "\n".join(clean(block) if is_selected else block for is_selected, block in blocks)


def _may_hold_name(line: str) -> bool:
    return "--" in line or bool(_NAME_HINT.search(line))


def _mask_named(text: str) -> str:
    for pattern in (_ASSIGNMENT, _FLAG, _ENV_LINE):
        text = pattern.sub(_mask_match, text)
    return text


def _mask_match(match: re.Match[str]) -> str:
    name, between, value = match["name"], match["between"], match["value"]
    secret = is_named_secret(name, value.strip("\\\"'$"))
    return name + between + _mask_in_quotes(value, between) if secret else match[0]


def _mask_in_quotes(value: str, between: str) -> str:
    """Return the mask in the quotes of its value; quoted after a colon, as bare asterisks are not valid YAML."""
    if value.startswith("\\"):
        quote = re.match(r"\\+\"", value)
        return f"{quote[0]}{MASK}{quote[0]}" if quote and value.endswith(quote[0]) else MASK
    if value[0] in "\"'" and value.endswith(value[0]) and len(value) > 1:
        return f"{value[0]}{MASK}{value[0]}"
    if '"' in between:
        return f'"{MASK}"'
    return f"'{MASK}'" if ":" in between else MASK
