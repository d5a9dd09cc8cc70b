"""The texts of a `generate`: what a model writes after each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from slurm_train.config.schema import RunConfig
from slurm_train.data.build import build_source
from slurm_train.data.source import describe
from slurm_train.errors import ConfigError
from slurm_train.train.context import Parts, gather
from slurm_train.train.texts import sample_text

if TYPE_CHECKING:
    from slurm_train.data.prepare import Encoding


def continue_texts(parts: Parts, *, prompts: Sequence[str], tokenizer: str | None, **sampling: Any) -> list[str]:
    """Returns what a model writes after each prompt. Collective over all ranks.

    Replicas take turns with the prompts. Ranks that hold parts of the weights compute each text together.

    Raises:
        ConfigError: as for `require_generates` and `encoding_of`.
    """
    rank = parts.rank
    model = parts.model
    require_generates(model)
    encoding = encoding_of(rank.config, tokenizer)
    turns = rank.layout.world_size if rank.layout.is_replicated else 1
    numbers_here = range(rank.place.rank % turns, len(prompts), turns)
    # Each token is a pass of the model, and progress for the hang watchdog.
    hook = model.register_forward_pre_hook(lambda *_: rank.heartbeat.mark("evaluate"))
    with parts.inputs.in_precision():
        texts = {number: continue_text(model, encoding, prompts[number], **sampling) for number in numbers_here}
    hook.remove()
    rank.heartbeat.mark("gather")
    all_texts: dict[int, str] = {}
    for texts_of_rank in gather(texts):
        all_texts |= texts_of_rank
    return [all_texts[number] for number in range(len(prompts))]


def continue_text(model: nn.Module, encoding: Encoding, prompt: str, **sampling: Any) -> str:
    """Returns what a model writes after a prompt, up to the end of the document; see `sample_text`."""
    return sample_text(model, encoding, prompt, end=encoding.end_of_document, **sampling).removesuffix("\n\n")


def require_generates(model: nn.Module) -> None:
    """Checks that a model can continue a text.

    Raises:
        ConfigError: it has no `generate`.
    """
    if not hasattr(model, "generate"):
        raise ConfigError(
            f"{type(model).__name__} cannot generate text",
            hint="the shipped GPT and model=hf can; a model of your own needs generate(tokens_BT, num_tokens=..., "
            "**how), as slurm_train.models.sampling.sample",
        )


def encoding_of(config: RunConfig, tokenizer: str | None) -> Encoding:
    """Returns the encoding of a tokenizer's file, else that of the data, else that in the model's directory.

    Raises:
        ConfigError: none of them has one.
    """
    from slurm_train.data.prepare import FileEncoding, tokenizer_file

    if tokenizer is None:
        source = build_source(config.data or {}, split="train", seed=config.seed)
        encoding = None if source is None else describe(source).encoding
        if encoding is not None:
            return encoding()
        tokenizer = (config.model or {}).get("path")
        if tokenizer is None or not tokenizer_file(Path(tokenizer)).is_file():
            raise ConfigError(
                f"no tokenizer is known: data._target_={(config.data or {}).get('_target_')} is not prepared text",
                hint="name one: --tokenizer tokenizer.json",
            )
    return FileEncoding(tokenizer_file(Path(tokenizer)))
