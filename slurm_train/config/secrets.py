"""What looks like a secret: by its name, by its form. Such a value is refused before it is written anywhere.

A configuration, a script and a command line are kept, copied and shown to others; a secret belongs into the
environment of the job or into a file that only its user reads. `redact` and `refuse_secrets` go by the same rules: what
would be replaced in a quoted text is refused in a setting. Names and forms are no proof: a password that looks like a
word under a harmless name passes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurm_train.errors import ConfigError

REDACTED = "[redacted]"
# Of environment variables: WANDB_API_KEY, HF_TOKEN, AWS_ACCESS_KEY_ID, PGPASSWORD; not TOKENIZERS_PARALLELISM.
_ENV_NAME = re.compile(
    r"(?:^|_)(?:KEY|KEYS|PAT|PASS|PWD|AUTH|JWT|COOKIE)(?:_|$)|(?:KEY|TOKEN|PASSWD|PWD)$|(?:^|_)TOKEN(?:_|$)"
    r"|SECRET|PASSWORD|PASSPHRASE|CREDENTIAL|PRIVATE_KEY",
    re.IGNORECASE,
)
# They name a place, not the secret itself.
_PLACE_NAME = re.compile(r"_(?:FILE|PATH|DIR|HOME|NAME|URL|SOCK)$|^(?:OLD)?PWD$", re.IGNORECASE)
# Of keys and of flags in a user's own words, where `text_key` and `pad_token` are harmless.
_KEY_NAME = re.compile(
    r"(?:^|_)(?:api|access|secret|private|auth|encryption|wandb|openai)_?key$"
    r"|(?:^|_)(?:api|access|auth|bearer|session|refresh|hf|github|gitlab)_?token$|^token$"
    r"|(?:^|_)(?:password|passwd|passphrase|secret)$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"\bsk-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bpypi-[\w-]{30,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    # Who knows the address of a webhook can post to it.
    r"|\bhttps://hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]{16,}"
    r"|\bhttps://(?:[a-z]+\.)?discord(?:app)?\.com/api/webhooks/[\w/-]{16,}"
    r"|\bhttps://[\w.-]+\.webhook\.office\.com/\S{16,}|\bhttps://api\.telegram\.org/bot\d+:[\w-]{16,}"
    r"|\b(?:Bearer|Basic)\s+[\w.~+/-]{16,}=*"
)
# Signatures and keys in addresses: Azure's sig, presigned addresses of S3 and GCS, keys of web services.
_SECRET_IN_QUERY = re.compile(
    r"([?&](?:sig|signature|x-amz-signature|x-goog-signature|code|key|api_?key|token|access_token)=)([^&\s'\"$]{16,})",
    re.IGNORECASE,
)
_CREDENTIAL_IN_URL = re.compile(
    r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]*:[^\s/@'\"]+@|(\bhttps?://)(?!\[redacted\])[^\s/@:'\"]+@", re.IGNORECASE
)
# A flag and its value as the next word; a flag or a variable is none.
_FLAG = re.compile(r"(?<!\S)(--?[\w-]+)(\s+)([^\s'\"$`-][^\s'\"]{7,})")
_ASSIGNMENT = re.compile(r"""(["']?[\w-]+["']?\s*(?:=|:)\s*)(["']?)([^\s"',;]{6,})\2""")
_HARMLESS = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"})
_OPEN = ("model", "data", "task", "track", "callbacks")


def is_secret_name(name: str) -> bool:
    """Returns whether an environment variable is called like a secret, e.g. "WANDB_API_KEY"."""
    return _ENV_NAME.search(name) is not None and _PLACE_NAME.search(name) is None


def is_secret_value(text: str) -> bool:
    """Returns whether a text has the form of a known kind of token, or is a URL with a secret in it."""
    return any(form.search(text) is not None for form in (_VALUE, _CREDENTIAL_IN_URL, _SECRET_IN_QUERY))


def redact(text: str) -> str:
    """Returns a text of any kind with everything that looks like a secret replaced by "[redacted]"."""
    text = _CREDENTIAL_IN_URL.sub(lambda match: f"{match[1] or match[2]}{REDACTED}@", _VALUE.sub(REDACTED, text))
    text = _SECRET_IN_QUERY.sub(lambda match: f"{match[1]}{REDACTED}", text)
    return _ASSIGNMENT.sub(_redact_assignment, _FLAG.sub(_redact_flag, text))


def _redact_flag(match: re.Match[str]) -> str:
    is_secret = _KEY_NAME.search(match[1].lstrip("-").replace("-", "_")) and match[3] != REDACTED
    return f"{match[1]}{match[2]}{REDACTED}" if is_secret else match[0]


def _redact_assignment(match: re.Match[str]) -> str:
    name = match[1].rstrip("=: \t").strip("\"'").lstrip("-").replace("-", "_")
    is_secret = _KEY_NAME.search(name) or (name.isupper() and is_secret_name(name))
    # What the shell puts in there is in no text: export API_KEY=$KEY.
    if is_secret and match[3] != REDACTED and not match[3].startswith(("$", "`")):
        return f"{match[1]}{match[2]}{REDACTED}{match[2]}"
    # "it failed: token=..." is an assignment within what looks like one.
    return f"{match[1]}{match[2]}{_ASSIGNMENT.sub(_redact_assignment, match[3])}{match[2]}"


def refuse_secrets(mapping: Mapping[str, Any]) -> None:
    """Refuses a configuration that holds a secret in plain text.

    Raises:
        ConfigError: naming the key, never the value; or an entry of `notify` is no command.
    """
    # A flag and its value are two words.
    words = mapping.get("script")
    script = " ".join(map(str, words)) if isinstance(words, list) else ""
    for key, name, value in (*_leaves(mapping), ("script", "", script)):
        if isinstance(value, str) and (_is_secret(key, name, value) or redact(value) != value):
            raise ConfigError(
                f"{key} holds what looks like a secret; it would be written into the run directory and shown by Slurm",
                hint=_advice(key, name),
            )
    _check_notify(mapping.get("notify"))


def _check_notify(entries: object) -> None:
    for entry in [str(entry) for entry in entries] if isinstance(entries, list) else []:
        if re.match(r"https?://", entry):
            raise ConfigError(
                "notify holds the address of a webhook, which is often a secret; it would be written into the run "
                "directory",
                hint="put it into a file of your home that only you read: notify=[file:~/.notify_url]; or name a "
                "variable: notify=[env:NOTIFY_URL] cluster.export=[NOTIFY_URL]",
            )
        try:
            words = shlex.split(entry)
        except ValueError as err:
            raise ConfigError(f"notify has {entry!r}, which is no command: {err}", hint="close its quotes") from None
        if not words:
            raise ConfigError("notify has an empty entry", hint='a command, "file:PATH" or "env:NAME"')


def _is_secret(key: str, name: str, value: str) -> bool:
    """Returns whether the key of a value says that it is a secret."""
    if value.lower() in _HARMLESS:
        return False
    if key.startswith("cluster.env."):
        return is_secret_name(name)
    if key.startswith(("cluster.sbatch.", "cluster.srun.")):
        return any(is_secret_name(variable) for variable in re.findall(r"(\w+)=", value))
    # An unbroken text of some length: "token: word" in a data set's options is none.
    return key.startswith(_OPEN) and _KEY_NAME.search(name) is not None and re.fullmatch(r"\S{8,}", value) is not None


def _advice(key: str, name: str) -> str:
    if key.startswith("cluster.env."):
        return f"set {name} in the shell that you submit from, and name it: cluster.export=[{name}]"
    return "read it in your own code, from a file in your home or from a variable named by cluster.export=[NAME]"


def _leaves(value: Any, key: str = "", name: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yields dotted key, nearest name and value of everything in a configuration, names themselves included."""
    if isinstance(value, Mapping):
        for child, inner in value.items():
            inner_key = f"{key}.{child}" if key else str(child)
            yield f"{key or 'the configuration'} (a name in it)", "", str(child)
            yield from _leaves(inner, inner_key, str(child))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{index}]", name)
    else:
        yield key, name, value
