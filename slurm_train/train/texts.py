"""What a language model writes, in a training and as its last lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slurm_train.data.source import Description, SampleSource, describe
from slurm_train.train.preserve import modes_kept

if TYPE_CHECKING:
    from slurm_train.data.prepare import Encoding

# A table of all pairs of ids: for bytes, not for a vocabulary of words.
_LARGEST_BIGRAM_VOCABULARY = 1024
_NOT_PRINTABLE = "\N{REPLACEMENT CHARACTER}"


def say_text(
    say: Callable[[str], None], model: nn.Module, *, train: SampleSource, heldout: SampleSource | None, num_tokens: int
) -> None:
    """Prints how a text model compares with counting pairs, and what it writes; nothing for other models."""
    text = describe(train)
    if text.encoding is None or text.shards is None:
        return
    encoding = text.encoding()
    held_out = Description() if heldout is None else describe(heldout)
    is_small = encoding.vocab_size <= _LARGEST_BIGRAM_VOCABULARY
    if is_small and held_out.shards is not None and held_out.bytes_per_target is not None:
        from slurm_train.models.bigram import bigram_bits_per_byte

        bits = bigram_bits_per_byte(
            text.shards(),
            held_out.shards(),
            vocab_size=encoding.vocab_size,
            bytes_per_target=held_out.bytes_per_target,
        )
        say(f"a bigram model on the same held-out bytes: {bits:.4f} bits per byte")
    if num_tokens > 0 and hasattr(model, "generate"):
        written = sample_text(model, encoding, num_tokens=num_tokens)
        # The bytes of a model that was hardly trained are no text; to print them helps nobody.
        is_text = written.count(_NOT_PRINTABLE) * 4 < len(written)
        say(f"the model writes:\n{written}" if is_text else "the model does not write text yet; train it longer")


def sample_text(model: Any, encoding: Encoding, prompt: str = "", *, seed: int = 0, **sampling: Any) -> str:
    """Returns what a model writes after a prompt, or at the beginning of a document; the same for equal weights.

    Args:
        model: has `generate`, as the shipped GPT.
        encoding: of the text it was trained with.
        prompt: is not repeated in the text.
        seed: of the draws.
        **sampling: for `generate`: num_tokens, temperature, top_k, end.
    """
    device = next(model.parameters()).device
    # A document begins as in training: with the tokenizer's own tokens, or else after the end of another one.
    start = [*encoding.begin_of_document] or [encoding.end_of_document]
    if prompt:
        start += next(iter(encoding.encode([prompt.encode()]))).tolist()
    tokens = torch.tensor([start], dtype=torch.int64, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    # A compiled model would be compiled again for the lengths that a text has as it grows.
    with modes_kept(model), torch.compiler.set_stance("force_eager"):
        model.eval()
        generated = model.generate(tokens, generator=generator, **sampling)[0, len(start) :].tolist()
    return printable(encoding.decode(generated))


def printable(text: str) -> str:
    """Returns a text that cannot steer a terminal: a model may write any byte, and a terminal obeys some of them."""
    return "".join(char if char.isprintable() or char in "\n\t" else _NOT_PRINTABLE for char in text)
