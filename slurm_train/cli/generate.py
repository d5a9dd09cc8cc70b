"""`generate RUN|CHECKPOINT --prompt TEXT`: lets a language model continue a text, and prints both.

It uses the tokenizer of the run's data, and a GPU of this machine if there is one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.evaluate import find_saved
from slurm_train.cli.selection import parse_runs
from slurm_train.cli.terminal import answer
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_DONE, ConfigError
from slurm_train.launch.imports import import_from_snapshot
from slurm_train.launch.placement import require_all

if TYPE_CHECKING:
    from slurm_train.data.prepare import Encoding


def main(words: Sequence[str]) -> int:
    """Prints the text."""
    arguments = parse_runs("generate", words)
    least = {"--max-new-tokens": (arguments.max_new_tokens, 1), "--temperature": (arguments.temperature, 0)}
    if arguments.top_k is not None:
        least["--top-k"] = (arguments.top_k, 1)
    require_all(
        (not value >= bound, f"{flag} must be at least {bound}, got {value}", f"for example {flag} {bound}")
        for flag, (value, bound) in least.items()
    )
    if arguments.tokenizer is not None:
        arguments.tokenizer = str(Path(arguments.tokenizer).resolve())
    checkpoint, run = find_saved(arguments.run, root=Path(arguments.root))
    import_from_snapshot(str(run.path), python_path=os.environ.get("PYTHONPATH", ""))
    answer(_write(load_config(run.config), checkpoint, arguments))
    return EXIT_DONE


def _write(config: RunConfig, checkpoint: Path, arguments: argparse.Namespace) -> str:
    import torch

    from slurm_train.checkpoint.load import read_model, require_fit
    from slurm_train.train.build import build_model
    from slurm_train.train.metrics import sample_text

    model = build_model(config, device=torch.device("cpu"))
    if not hasattr(model, "generate"):
        raise ConfigError(
            f"{type(model).__name__} cannot generate text",
            hint="the shipped GPT and model=hf can; a model of your own needs generate(tokens_BT, num_tokens=..., "
            "**how), as slurm_train.models.sampling.sample",
        )
    encoding = _encoding(config, arguments.tokenizer)
    require_fit(checkpoint, model.state_dict())
    _, tensors = read_model(checkpoint)
    model.load_state_dict(tensors)
    prompt = arguments.prompt or ""
    text = sample_text(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        encoding,
        prompt,
        seed=arguments.seed,
        num_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        end=encoding.end_of_document,
    )
    return prompt + text.removesuffix("\n\n")


def _encoding(config: RunConfig, tokenizer: str | None) -> Encoding:
    """Returns the encoding of `--tokenizer`, else that of the data, else that in the model's directory."""
    from slurm_train.data.build import build_source
    from slurm_train.data.prepare import FileEncoding, tokenizer_file

    if tokenizer is None:
        source = build_source(config.data or {}, split="train", seed=config.seed)
        if hasattr(source, "encoding"):
            found: Encoding = source.encoding()  # type: ignore[union-attr]  # it has one
            return found
        tokenizer = (config.model or {}).get("path")
        if tokenizer is None or not tokenizer_file(Path(tokenizer)).is_file():
            raise ConfigError(
                f"no tokenizer is known: data._target_={(config.data or {}).get('_target_')} is not prepared text",
                hint="name one: --tokenizer tokenizer.json",
            )
    return FileEncoding(tokenizer_file(Path(tokenizer)))
