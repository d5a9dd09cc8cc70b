"""Secrets are known by name and by form, refused where they would be kept, and blotted out where they are quoted."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_train.config.secrets import is_secret_name, is_secret_value, redact, refuse_secrets
from slurm_train.errors import ConfigError
from tests.support.refusals import refusal

# fmt: off
SECRET_NAMES = [
    "WANDB_API_KEY", "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GH_PAT", "PGPASSWORD", "DB_PASS",
    "OPENAI_API_KEY", "my_secret", "GITLAB_TOKEN", "GOOGLE_CREDENTIALS", "SLURM_JWT", "MYTOKEN",
    "NEPTUNE_API_TOKEN", "COMET_APIKEY",
]
PLAIN_NAMES = [
    "TOKENIZERS_PARALLELISM", "PATH", "HOME", "PWD", "OLDPWD", "NCCL_DEBUG", "SSH_AUTH_SOCK", "BYPASS", "KEYBOARD",
    "PASSES", "MASTER_ADDR", "SSH_KEY_PATH", "HF_TOKEN_PATH", "COMPASS",
]
# fmt: on
# Made up; split so that no scanner of this repository takes them for real.
TOKENS = (
    "sk-" + "a1B2" * 6,
    "hf_" + "aB3" * 9,
    "ghp_" + "aB3d" * 9,
    "AKIA" + "ABCD" * 4,
    "xoxb-" + "1234567890-abc",
    "https://ada:" + "pa55word@git.example.org/x.git",
    "https://" + "0123456789abcdef@git.example.org/x.git",
    "postgresql://ada:" + "pw@db/x",
    "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "https://hooks.slack.com/services/" + "T0001/B0002/abcdefgh12345678",
    "https://discord.com/api/webhooks/" + "123456789/abcdefgh12345678",
    "https://api.telegram.org/bot" + "123456:abcdefgh12345678",
    "curl -H 'Authorization: Bearer " + "abcdefgh12345678'",
    "https://store.blob.core.windows.net/c/x?sv=1&sig=" + "abcdefgh12345678%3D",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Signature=" + "abcdefgh12345678",
)
HARMLESS = (
    "https://example.org/a:b@c",
    "a@b.org",
    "sk-learn",
    "hf_model",
    "node[1-2]:4",
    "10:30@x",
    "http://proxy:8080",
    "export WANDB_API_KEY=$(cat ~/.wandb_key)",
    "export WANDB_API_KEY=`pass_wandb_key`",
    "HF_TOKEN=$MY_TOKEN_OF_HF",
    "curl -H 'Authorization: Bearer $TOKEN_OF_MINE'",
    "--token-file /home/ada/token_of_hf",
    "https://example.org/x?page=1234567890123456789",
)


def test_a_secret_is_known_by_its_name() -> None:
    assert [name for name in SECRET_NAMES if not is_secret_name(name)] == []
    assert [name for name in PLAIN_NAMES if is_secret_name(name)] == []


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_known_by_its_form_anywhere_and_blotted_out(token: str) -> None:
    assert is_secret_value(f"x {token} y")
    assert not is_secret_value(redact(f"x {token} y"))
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        refuse_secrets({"model": {"layers": [{"a": f"x{'' if token[0] == '-' else ' '}{token}"}]}})
    assert token not in str(caught.value)


@pytest.mark.parametrize("text", HARMLESS)
def test_a_harmless_text_stays(text: str) -> None:
    assert not is_secret_value(text)
    assert redact(text) == text


@pytest.mark.parametrize(
    "config",
    [
        {"cluster": {"env": {"WANDB_API_KEY": "0123456789abcdef"}}},
        {"cluster": {"sbatch": {"export": "ALL,WANDB_API_KEY=canary"}}},
        {"cluster": {"srun": {"export": "HF_TOKEN=canary"}}},
        {"task": {"api_key": "canary-canary"}},
        {"model": {"inner": {"hf_token": "canary-canary"}}},
        {"script": ["train.py", "--wandb-key", "canary-canary"]},
        {"script": ["train.py", "--api-key=canary-canary"]},
        {"script": ["train.py", "wandb.api_key=canary-canary"]},
        {"script": ["env", "WANDB_API_KEY=canary-canary", "python", "train.py"]},
        {"script": ["bash", "-c", "train --token canary-canary"]},
        {"cluster": {"setup": ["module load cuda", "export WANDB_API_KEY=canary-canary"]}},
        {"notify": ["curl --token canary-canary https://example.org"]},
        {"notify": ["curl -d @- https://hooks.slack.com/services/canary/canary/canary123"]},
        {"data": {"url": "https://store.blob.core.windows.net/c/x?sig=canarycanarycanary"}},
    ],
)
def test_a_secret_under_a_telling_name_is_refused_and_not_repeated(config: dict[str, Any]) -> None:
    error = refusal(ConfigError, refuse_secrets, config)
    assert "canary" not in str(error)
    assert "cluster.export" in error.hint


@pytest.mark.parametrize(
    "config",
    [
        {"cluster": {"env": {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "K_KEY": ""}}},
        {"data": {"text_key": "sentence_a", "pad_token": "<|endoftext|>", "max_tokens": "1000000000"}},
        {"script": ["train.py", "--sort-key", "length_of_it", "--token", "<s>", "--password"]},
        {"task": {"token": "short"}, "cluster": {"env": {"SSH_KEY_PATH": "/home/ada/.ssh/id"}}},
    ],
)
def test_what_only_sounds_like_a_secret_passes(config: dict[str, Any]) -> None:
    refuse_secrets(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('+API_KEY = "canary-1"\n x', '+API_KEY = "[redacted]"\n x'),
        ("export WANDB_API_KEY=canary-1", "export WANDB_API_KEY=[redacted]"),
        ("--api-key=canary-1", "--api-key=[redacted]"),
        ("password: hunter22", "password: [redacted]"),
        ("num_tokens = 123456", "num_tokens = 123456"),
        ("key = lambda item: item", "key = lambda item: item"),
    ],
)
def test_a_quoted_assignment_loses_its_secret(text: str, expected: str) -> None:
    assert redact(text) == expected
