"""The end of a run on rank 0: result.json, and what a person wants to read then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slurm_train.data.source import SampleSource
from slurm_train.rundir.attempts import publish_result
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import sweep_of
from slurm_train.train.loop import Loop, in_words

if TYPE_CHECKING:
    from slurm_train.data.tokens import TokenSource

# A table of all pairs of ids: for bytes, not for a vocabulary of words.
_LARGEST_BIGRAM_VOCABULARY = 1024
_NOT_PRINTABLE = "\N{REPLACEMENT CHARACTER}"
_NOT_EVALUATED = "nothing was evaluated, the data have no held-out samples (set data.heldout, or take a `split`)"


def write_result(run: RunDirectory, loop: Loop, *, weights_digest: str, attempt: int, world_size: int) -> None:
    """Writes result.json, which says that the run is finished.

    Raises:
        RunError: a newer attempt has taken over; the result is its business.
    """
    values: dict[str, Any] = {
        "step": loop.position.step,
        "samples": loop.position.samples,
        "loss": loop.position.loss,
        **loop.measures,
        "weights_digest": weights_digest,
        "attempt": attempt,
        "world_size": world_size,
        "time_unix_s": time.time(),
    }
    publish_result(run, attempt, values)


def say_finished(say: Callable[[str], None], run: RunDirectory, loop: Loop) -> None:
    """Says the held-out numbers, where everything is, and what to do next."""
    say(f"finished step {loop.position.step}: {in_words(loop.measures) if loop.measures else _NOT_EVALUATED}")
    say(f"run directory: {run.path}")
    if sweep_of(run) is not None:
        return  # The sweep says what is next, once.
    say(f"next: python -m slurm_train status {run.run_id}")
    say("      another run of the same: the same words with seed=N or run.name=NAME")


def say_stopped(say: Callable[[str], None], run: RunDirectory, loop: Loop, *, returns: bool) -> None:
    """Says where the run stopped and how it goes on.

    Args:
        say: prints a line.
        run: the run.
        loop: where it stands.
        returns: its job is requeued after a preemption or a time limit; a rank does not know which it was.
    """
    if loop.not_saved:
        say(f"stopped at step {loop.position.step} without a save: {loop.not_saved}; the newest checkpoint counts")
    else:
        say(f"stopped at step {loop.position.step}; everything is saved in {run.path}")
    if returns:
        say("next: nothing to do after a preemption or at the time limit: the job comes back by itself")
        say(f"      after a cancel: python -m slurm_train resume {run.run_id}")
    else:
        say(f"next: python -m slurm_train resume {run.run_id}")


def say_text(
    say: Callable[[str], None], model: nn.Module, *, train: SampleSource, heldout: SampleSource | None, num_tokens: int
) -> None:
    """Says how a text model compares with counting pairs, and shows what it writes; other models say nothing."""
    if not hasattr(train, "encoding") or not hasattr(train, "shards"):
        return
    train_tokens: TokenSource = train  # type: ignore[assignment]  # it has what is used here
    vocabulary = train_tokens.encoding().vocab_size
    if heldout is not None and vocabulary <= _LARGEST_BIGRAM_VOCABULARY:
        heldout_tokens: TokenSource = heldout  # type: ignore[assignment]
        say(f"a bigram model on the same held-out bytes: {_bigram(train_tokens, heldout_tokens):.4f} bits per byte")
    if num_tokens > 0 and hasattr(model, "generate"):
        text = _sample(model, train_tokens, num_tokens)
        # The bytes of a model that has hardly begun are no text, and no news.
        is_text = text.count(_NOT_PRINTABLE) * 4 < len(text)
        say(f"the model writes:\n{text}" if is_text else "the model does not write text yet; train it longer")


def _bigram(train: TokenSource, heldout: TokenSource) -> float:
    from slurm_train.models.bigram import bigram_bits_per_byte

    return bigram_bits_per_byte(
        train.shards(),
        heldout.shards(),
        vocab_size=train.encoding().vocab_size,
        bytes_per_target=heldout.bytes_per_target,
    )


def _sample(model: Any, source: TokenSource, num_tokens: int) -> str:
    encoding = source.encoding()
    device = next(model.parameters()).device
    # A document begins after the end of another one.
    start = torch.full((1, 1), encoding.vocab_size - 1, dtype=torch.int64, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    model.eval()
    try:
        tokens = model.generate(start, num_tokens=num_tokens, generator=generator)
    finally:
        model.train()
    return _printable(encoding.decode(tokens[0, 1:].tolist()))


def _printable(text: str) -> str:
    # A model may write any byte; a terminal obeys some of them.
    return "".join(char if char.isprintable() or char in "\n\t" else _NOT_PRINTABLE for char in text)
