"""A model and a data set in double precision, small and slow enough to interrupt; named by `_target_` in the tests."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.models import head
from slurm_train.models.gpt import GPT
from slurm_train.train.callbacks import Callback

NUM_SAMPLES = 97
NUM_HELD_OUT = 37
FEATURES = 6


class Net(nn.Module):
    """A small classifier with dropout off by default.

    Args:
        dropout: to prove that random streams are keyed by the step.
        step_s: seconds that each forward pass of training takes at least.
        signal_at: forward pass of training (from 1) at which `signal_rank` sends itself TERM three times; 0 never.
        signal_rank: the rank that does.
        only_in: file that must not exist for the signal to be sent; it is made then, so a resumed run goes on.
        in_evaluation: the signal is sent in the first evaluation instead.
        flip_at: forward pass of training (from 1) before which rank 1 flips one bit of one weight; 0 never.
    """

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        step_s: float = 0.0,
        signal_at: int = 0,
        signal_rank: int = 0,
        only_in: str = "",
        in_evaluation: bool = False,
        flip_at: int = 0,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)).double()
        self.step_s, self.signal_at, self.signal_rank, self.only_in = step_s, signal_at, signal_rank, only_in
        self.in_evaluation = in_evaluation
        self.flip_at = flip_at
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            time.sleep(self.step_s)
            if self.flip_at and self.passes == self.flip_at and os.environ["RANK"] == "1":
                self.layers[0].weight.data.view(torch.int64)[3, 2] ^= 1
        due = not self.training if self.in_evaluation else self.training and self.passes == self.signal_at
        if due and self.only_in and int(os.environ["RANK"]) == self.signal_rank and not Path(self.only_in).exists():
            Path(self.only_in).touch()
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
        # A sample far out makes its whole batch a spike.
        return self.layers(inputs) * (100.0 if inputs.abs().max() > 1e3 else 1.0)


class Branches(Net):
    """Each batch goes through one of two layers, on some ranks the one and on some the other; a third is never used."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.sides = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.sides[int(inputs[0, 0] > 0)](inputs))


class Gated(nn.Module):
    """A residual layer with a scalar, and with a vector of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.slope = nn.Parameter(torch.tensor([0.25]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.gate * torch.tanh(self.layer(inputs)) + self.slope


class Scaled(Net):
    """A scalar parameter in each block and one beside the blocks."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.blocks = nn.ModuleList(Gated() for _ in range(2)).double()
        self.scale = nn.Parameter(torch.tensor(1.6, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return super().forward(inputs) * self.scale.exp()


class Detector(nn.Module):
    """Finds boxes with the signature of torchvision's detectors: a dict of losses in training, else predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 5, 3, padding=1).double()
        self.box = nn.Linear(5, 4).double()

    def forward(self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]] | None = None) -> Any:
        found = torch.stack([self.box(self.features(image).tanh().mean(dim=(1, 2))) for image in images])
        if not self.training:
            return [{"boxes": box[None]} for box in found]
        assert targets is not None and all(isinstance(target["image_id"], int) for target in targets)
        middles = torch.stack([target["boxes"].mean(dim=0) for target in targets])
        return {"loss_box": (found - middles).square().mean(), "loss_size": 0.1 * found.abs().mean()}


class MeasuredDetector(Detector):
    """The same with a loss of held-out samples."""

    def evaluation_sums(self, batch: Any) -> dict[str, Any]:
        images, targets = batch
        errors = [
            (found["boxes"] - target["boxes"]).square().mean()
            for found, target in zip(self(images), targets, strict=True)
        ]
        return {"loss": torch.stack(errors).sum(), "count": len(images)}


class Boxes(torch.utils.data.Dataset[Any]):
    """Images of unequal sizes with one to four boxes each.

    Args:
        split: "train" or "heldout".
    """

    def __init__(self, *, split: str = "train") -> None:
        self.generator_seed = 5 if split == "train" else 6

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * self.generator_seed + index)
        size = {"generator": generator, "dtype": torch.float64}
        boxes = torch.rand(1 + index % 4, 4, **size)
        return torch.rand(3, 4 + index % 3, 5, **size), {"boxes": boxes, "image_id": index}


def as_lists(items: Sequence[Any]) -> Any:
    """Returns (images, targets), both as lists."""
    images, targets = zip(*items, strict=True)
    return list(images), list(targets)


class DoubleGPT(GPT):
    """The shipped transformer, tiny and in double precision, so that layouts differ by almost nothing.

    Args:
        signal_at: forward pass of training (from 1) at which the last rank sends itself TERM; 0 never.
        only_in: as for `Net`.
        bad_at: forward pass of training (from 1) whose logits are not finite on every rank; 0 never.
        in_evaluation: the signal is sent in the first evaluation instead.
        dtype: another precision.
        in_chunks: scores exist for a few tokens at a time only, of a padded vocabulary.
        frozen: beginnings of the names of parameters that are not trained.
        **shape: what `GPT` takes, in place of the tiny shape.
    """

    def __init__(
        self,
        *,
        signal_at: int = 0,
        only_in: str = "",
        bad_at: int = 0,
        in_evaluation: bool = False,
        dtype: str = "float64",
        in_chunks: bool = False,
        frozen: Sequence[str] = (),
        **shape: Any,
    ) -> None:
        super().__init__(**{**TINY, **shape})
        self.to(getattr(torch, dtype))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))
        self.signal_at, self.only_in, self.bad_at, self.passes = signal_at, only_in, bad_at, 0
        self.in_evaluation = in_evaluation
        if in_chunks:
            head._PLAIN_SCORES, head._CHUNK_SCORES_ON_CPU, head._ALIGNMENT_ON_CPU = 0, 200, 5
        self.is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def forward(self, tokens_BT: Tensor, targets: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        given = super().forward(tokens_BT, targets, position_ids)
        self.passes += self.training
        due = not self.training if self.in_evaluation else self.training and self.passes == self.signal_at
        if due and self.only_in and self.is_last and not Path(self.only_in).exists():
            Path(self.only_in).touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return given * float("nan") if self.training and self.passes == self.bad_at else given


class ScaledGPT(DoubleGPT):
    """The same with a scalar that multiplies what the first block gives."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self.blocks[0].gate = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
        self.blocks[0].register_forward_hook(lambda block, _, outputs: outputs * block.gate)


class Settles(DoubleGPT):
    """Switches the dropout of its blocks off in its fourth pass of training, and counts the passes in a buffer."""

    def forward(self, tokens_BT: Tensor, targets: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        if self.training:
            if not hasattr(self, "num_passes"):
                self.register_buffer("num_passes", torch.zeros(()))
            self.num_passes += 1
        if self.passes == 4:
            self.blocks.eval()
        return super().forward(tokens_BT, targets, position_ids) * (1.0 + 0.01 * self.num_passes)


class LooksAtWeights(GPT):
    """The shipped transformer with a constructor that needs values, so every rank builds it whole."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        assert self.head.weight.abs().max().item() > 0


def double_llama() -> nn.Module:
    """Transformers' Llama in double precision, as small as `TINY`; its norms compute in float32 all the same."""
    from slurm_train.models.causal_lm import causal_lm

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    return causal_lm(model_type="llama", config={"vocab_size": 13, "num_key_value_heads": 2, **shape}).double()


TINY: dict[str, Any] = {"vocab_size": 16, "context": 8, "num_layers": 4, "num_heads": 4, "width": 16, "hidden": 32}


class Tokens(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """Sequences that count up by a step of their own; an odd number of them, fewer held out.

    Args:
        split: "train" or "heldout".
        document: positions of a document, of which a sequence has several; 0: it is one, and positions are not said.
    """

    def __init__(self, *, split: str = "train", document: int = 0) -> None:
        self.document = document
        generator = torch.Generator().manual_seed(5 if split == "train" else 6)
        start, stride = (torch.randint(0, 13, (NUM_SAMPLES, 1), generator=generator) for _ in range(2))
        self.tokens = ((start + stride * torch.arange(9)) % 13)[: NUM_SAMPLES if split == "train" else NUM_HELD_OUT]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = self.tokens[index, :-1], self.tokens[index, 1:]
        if not self.document:
            return inputs, targets
        # Another cut for each sequence.
        return inputs, targets, (torch.arange(len(inputs)) + index) % self.document


class NamedTokens(Tokens):
    """The same sequences by name."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return {"tokens_BT": inputs, "labels": targets}


class TokenStream:
    """The same sequences one after the other, a part for each rank, one in eight at random left out.

    Args:
        rank: whose part.
        num_ranks: how many parts.
        gives_all: none is left out.
    """

    def __init__(self, *, rank: int, num_ranks: int, gives_all: bool = False) -> None:
        self.samples, self.numbers, self.place = Tokens(), range(rank, NUM_SAMPLES, num_ranks), 0
        self.gives_all = gives_all

    def __iter__(self) -> Any:
        while self.place < len(self.numbers):
            self.place += 1
            if self.gives_all or torch.rand(()) > 1 / 8:
                yield self.samples[self.numbers[self.place - 1]]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sequences of very unequal lengths; each number is to be told by its sign.

    Args:
        split: "train" or "heldout".
    """

    def __init__(self, *, split: str = "train") -> None:
        generator = torch.Generator().manual_seed(5 if split == "train" else 6)
        size = NUM_SAMPLES if split == "train" else 23
        self.lengths = torch.randint(1, 40, (size,), generator=generator).tolist()
        self.items = [
            torch.randn(length, FEATURES, generator=generator, dtype=torch.float64) for length in self.lengths
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        item = self.items[index]
        return item, (item.sum(dim=1) > 0).long()


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random points with a rule; an odd number of them, so that no split is even.

    Args:
        split: "train" or "heldout".
        bad: training samples whose inputs are multiplied.
        factor: what by, "nan" for instance.
    """

    def __init__(self, *, split: str = "train", bad: Sequence[int] = (), factor: str = "nan") -> None:
        generator = torch.Generator().manual_seed(3 if split == "train" else 4)
        self.inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        self.targets = (self.inputs.sum(dim=1) > 0).long() + (self.inputs[:, 0] > 1).long()
        if split == "train":
            self.inputs[list(bad)] *= float(factor)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class SameData(Data):
    """One sample again and again."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        del index
        return super().__getitem__(0)


class LateData(Data):
    """Points that rank 1 reads slowly while a file exists.

    Args:
        late_while: the file.
        split: "train" or "heldout".
    """

    def __init__(self, *, late_while: str, split: str = "train") -> None:
        super().__init__(split=split)
        self.late_while = Path(late_while)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if os.environ["RANK"] == "1" and self.late_while.exists():
            time.sleep(0.02)
        return super().__getitem__(index)


class Teller(Callback):
    """Writes down when it is called, and counts the steps and how often its state is asked.

    Args:
        also: a number that goes with each line, and where the count begins.
    """

    def __init__(self, *, also: int = 0) -> None:
        self.also = self.num_steps = also
        self.num_asked = 0

    def _tell(self, trainer: Any, hook: str) -> None:
        newest = None if trainer.newest is None else trainer.newest.facts.step
        with (trainer.rank.run.path / f"told_{trainer.rank.place.rank}.jsonl").open("a") as file:
            print(json.dumps([self.also, hook, trainer.position.step, newest]), file=file)

    def on_start(self, trainer: Any) -> None:
        self._tell(trainer, "start")

    def on_step_end(self, trainer: Any) -> None:
        self.num_steps += 1
        self._tell(trainer, "step_end")

    def on_evaluation(self, trainer: Any, measures: Mapping[str, float]) -> None:
        assert "eval_loss" in measures
        self._tell(trainer, "evaluation")

    def on_save(self, trainer: Any) -> None:
        self._tell(trainer, "save")

    def on_stop(self, trainer: Any) -> None:
        self._tell(trainer, "stop")

    def on_end(self, trainer: Any) -> None:
        self._tell(trainer, "end")

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        return {"num_steps": self.num_steps, "num_asked": self.num_asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_asked = state["num_steps"], state["num_asked"]


class Table(Callback):
    """Counts the steps in a tensor, and in a value, on one rank alone.

    Args:
        rank: which.
        has_value: whether the value is in its state.
    """

    def __init__(self, *, rank: int, has_value: bool = False) -> None:
        self.rank, self.has_value, self.num_steps = rank, has_value, 0

    def attach(self, parts: Any) -> None:
        self.table = torch.zeros(5000) if parts.rank.place.rank == self.rank else None

    def on_step_end(self, trainer: Any) -> None:
        self.num_steps += 1
        if self.table is not None:
            self.table += 1

    def on_end(self, trainer: Any) -> None:
        if self.table is not None:
            assert self.table.eq(trainer.position.step).all(), self.table[0]
            (trainer.rank.run.path / "table").write_text(f"{trainer.position.step} {self.num_steps}")

    def state_dict(self) -> dict[str, Any]:
        if self.table is None:
            return {}
        return {"table": self.table} | ({"num_steps": self.num_steps} if self.has_value else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.table is not None and state["table"] is self.table
        self.num_steps = state.get("num_steps", 0)


class Ender(Callback):
    """Asks on one rank for the end of the run.

    Args:
        moment: "step_end" or "evaluation".
        rank: the rank.
        step: from which step on.
    """

    def __init__(self, *, moment: str, rank: int, step: int) -> None:
        self.moment, self.rank, self.step = moment, rank, step

    def _ask(self, trainer: Any, moment: str) -> None:
        if moment == self.moment and trainer.rank.place.rank == self.rank and trainer.position.step >= self.step:
            trainer.end_early("it is enough")

    def on_step_end(self, trainer: Any) -> None:
        self._ask(trainer, "step_end")

    def on_evaluation(self, trainer: Any, measures: Mapping[str, float]) -> None:
        del measures
        self._ask(trainer, "evaluation")


class Stopper(Callback):
    """Asks for a stop on the last rank, as a signal would.

    Args:
        steps: at the ends of which of them the ranks agree.
        in_update: it asks while the optimizer updates the parameters in the step before, not after that step.
    """

    def __init__(self, *, steps: Sequence[int], in_update: bool = False) -> None:
        self.steps, self.in_update = steps, in_update
        self.num_updates = 0

    def attach(self, parts: Any) -> None:
        if self.in_update:
            parts.optimizer.register_step_pre_hook(lambda *_: self._begin_update(parts.rank))

    def _begin_update(self, rank: Any) -> None:
        self.num_updates += 1
        self._ask(rank, step=self.num_updates)

    def on_step_end(self, trainer: Any) -> None:
        if not self.in_update:
            self._ask(trainer.rank, step=trainer.position.step)

    def _ask(self, rank: Any, *, step: int) -> None:
        # With the next step's exchange the ranks agree.
        if step + 1 in self.steps and rank.place.rank == rank.place.world_size - 1:
            rank.stop.request()


class WithStatistics(Net):
    """A model that keeps running statistics."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
