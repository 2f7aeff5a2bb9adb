"""Redaction of passwords and tokens in all output: files of the run, console, error messages, loggers, the hub.

Recipes name data by URL, and URLs contain secrets: `https://user:password@host/rows.jsonl`, `…?X-Amz-Signature=…`. Only
the secret becomes `***`, so that the rest still shows where the data came from. These are pure functions of text:
redacting twice, or with another secret, gives the same result, so that redacted recipes of two runs can be compared.
"""

import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "***"

# `user:password@`; the second form is for passwords with a slash, which URLs do not allow but people write.
_PASSWORD = re.compile(r"(?<=://)(?:[^/\s?#<>]*:[^/\s?#<>]*@|[^/\s?#@:\[\"']*:(?!:|\d*(?:[/?#\s\"']|$))[^\s\"'<>]*@)")
# A user name alone may be a token (https://TOKEN@host), but not in abfs://container@account or ssh://user@host.
_LONE_TOKEN = re.compile(r"((?:https?|wss?|ftps?|git)://)[^/\s?#@:\"'<>]+@", re.IGNORECASE)
_SECRET_NAME = (r"(?:[\w.%-]{0,40}(?:token|secret|passw|pwd|signature|credential|auth|jwt|session)[\w.%-]{0,40}"
                r"|[\w.%-]{0,40}key(?:[-_]?id)?|sig|sas|pass|code)")
_QUERY = re.compile(rf"([?&;#]{_SECRET_NAME}=)[^&#;\s\"'<>]+", re.IGNORECASE)
_SCHEME = r"(?:bearer|basic|digest|token|negotiate)\b"
_HEADER = re.compile(rf"(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:{_SCHEME}\s+)?(?!{_SCHEME})|\bbearer\s+(?=\S{{8}}))"
                     r"[\w.~+/=-]+", re.IGNORECASE)
# Tokens with a known prefix: Hugging Face, GitHub, GitLab, AWS, Slack.
_BEGINNINGS = r"(?<![A-Za-z0-9])(hf_|api_org_|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|xox[abprs]-)"
_TOKEN = re.compile(rf"{_BEGINNINGS}[A-Za-z0-9_-]{{16,}}")
_REDACTED = re.compile(rf"://\*\*\*@|[?&;#]{_SECRET_NAME}=\*\*\*|{_BEGINNINGS}\*\*\*", re.IGNORECASE)

# Keys whose whole value is a secret, such as options of loggers; not `pad_token` or `max_new_tokens`.
_SECRET_KEY = re.compile(r"(?:.*_)?(?:api_?key|passw(?:or)?d|secret|secret_key|access_key|private_key|credentials?"
                         r"|(?:auth|access|refresh|session|security|hf|hub|api|bearer|use_auth)_token)|token|authorization",
                         re.IGNORECASE)
_OWN_NAMES = ("columns", "roles")  # mappings whose keys are the user's own names


def redact(text: str, *secrets: str | None) -> str:
    """Replace passwords and tokens in a text, and these `secrets` of any form."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN) if secret else text
    if "://" in text:
        text = _LONE_TOKEN.sub(rf"\g<1>{HIDDEN}@", _PASSWORD.sub(f"{HIDDEN}@", text))
    if "=" in text:
        text = _QUERY.sub(rf"\g<1>{HIDDEN}", text)
    return _TOKEN.sub(rf"\g<1>{HIDDEN}", _HEADER.sub(rf"\g<1>{HIDDEN}", text))


def redacted(value: Any, has_own_names: bool = False) -> Any:
    """Return a copy of nested mappings and lists, such as a recipe, with passwords and tokens redacted.

    Args:
        has_own_names: True if the keys of this mapping are the user's own names, whatever the values are.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    if isinstance(value, dict):
        return {redacted(key): HIDDEN if not has_own_names and _is_secret(key, item) else
                redacted(item, key in _OWN_NAMES) for key, item in value.items()}
    return value


def _is_secret(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, str) and bool(value) and bool(_SECRET_KEY.fullmatch(key))


def find_redacted(value: object, key: str = "") -> Iterator[str]:
    """Yield dotted keys of a recipe whose value contains a redacted password or token."""
    if isinstance(value, str) and (value == HIDDEN and _SECRET_KEY.fullmatch(key.rsplit(".", 1)[-1])
                                   or _REDACTED.search(value)):
        yield key
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_redacted(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from find_redacted(item, f"{key}.{name}" if key else str(name))
