"""The loss that is trained is the one that the model computes itself, whatever the split of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.data.mapstyle import pad
from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import Batch
from slurm_train.models.loss import LOW_TOLERANCE, TOLERANCE
from slurm_train.models.objective import Objective
from slurm_train.models.pretrained_names import require_effect
from slurm_train.train.samples import padding_for
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.library_losses import LIBRARY, batch_of, build


@torch.no_grad()
def mean_of(objective: Objective, parts: list[Any]) -> float:
    """Returns the mean over all items of the parts of a batch, as ranks and micro-batches add them up."""
    pairs = [objective(part) for part in parts]
    losses, counts = zip(*pairs, strict=True)
    return (sum(losses) / sum(counts)).item()


@torch.no_grad()
def compare(objective: Objective, batch: Batch, *, tolerance: float = TOLERANCE) -> str | None:
    """Returns what is said of a batch before the first step."""
    return objective.choose(batch).compare(batch, tolerance=tolerance)


def cut(batch: dict[str, Tensor], *sizes: int) -> list[dict[str, Tensor]]:
    parts = zip(*(tensor.split(list(sizes)) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


@pytest.mark.full
@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("kind", LIBRARY)
@torch.no_grad()
def test_losses_of_the_library_are_trained_as_they_are(kind: str) -> None:
    torch.manual_seed(1)
    model, batch = build(kind=kind), batch_of(kind)
    objective = Objective(model)
    objective.choose(batch).check_batch(batch)
    compare(objective, batch)
    assert model.training
    model.eval()
    theirs = model(**batch)
    assert mean_of(objective, [batch]) == pytest.approx(theirs.loss.item(), rel=1e-6)
    measured = objective.evaluation_sums(batch)
    assert float(measured["loss"] / measured["count"]) == pytest.approx(theirs.loss.item(), rel=1e-6)
    parts = cut(batch, 3, 1, 4)
    expected = theirs.loss.item()
    if getattr(theirs, "aux_loss", None) is not None:
        # The routers' balance is a property of a micro-batch: its mean over the items is what is trained.
        scale, outputs = model.router_aux_loss_coef, [model(**part) for part in parts]
        counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        routers = sum(out.aux_loss.item() * count for out, count in zip(outputs, counts, strict=True)) / sum(counts)
        expected += scale * (routers - theirs.aux_loss.item())
    assert mean_of(objective, parts) == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("kind", ["causal", "encoder-decoder", "token classification"])
def test_a_micro_batch_without_a_label_that_counts_adds_nothing(kind: str) -> None:
    model, batch = build(kind=kind).eval(), batch_of(kind)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    loss, count = Objective(model)(nothing)
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


class Weighted(nn.Module):
    """Computes a loss of its own from labels, in the way of transformers; `gives` says in what form."""

    def __init__(self, gives: str = "object") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.gives = gives

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layer(inputs)
        loss = None if labels is None else 4 * functional.cross_entropy(scores, labels)
        if self.gives == "tuple":
            return loss, scores
        return {"loss": loss, "logits": scores} if self.gives == "dict" else SimpleNamespace(loss=loss, logits=scores)


@torch.no_grad()
@pytest.mark.parametrize("gives", ["object", "dict", "tuple"])
def test_a_loss_of_a_models_own_is_trained_in_any_form_that_it_has(gives: str) -> None:
    model, batch = Weighted(gives), {"inputs": torch.randn(5, 4), "labels": torch.tensor([0, 1, 2, -100, 1])}
    expected = 4 * functional.cross_entropy(model.layer(batch["inputs"]), batch["labels"])
    assert mean_of(Objective(model), [batch]) == pytest.approx(expected.item())
    assert mean_of(Objective(model), cut(batch, 1, 3, 1)) == pytest.approx(expected.item())
    sums = Objective(model).evaluation_sums(batch)
    assert float(sums["loss"]) == pytest.approx(4 * expected.item(), rel=1e-6) and sums["count"] == 4


def test_another_loss_than_that_of_tuples_is_an_error_with_both_numbers() -> None:
    batch = (torch.randn(5, 4), torch.tensor([0, 1, 2, 2, 1]))
    model = Weighted()
    ours = functional.cross_entropy(model.layer(batch[0]), batch[1]).item()
    with pytest.raises(ConfigError) as caught:
        compare(Objective(model), batch)
    said = f"the loss of the first samples is {ours:.6f} here, and Weighted computes {4 * ours:.6f} itself"
    assert caught.value.message == said
    assert model.training


class Reduced(nn.Module):
    """Gives a loss of its own that a function makes of scores and labels."""

    def __init__(self, reduce: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.reduce = reduce

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layer(inputs)
        return {"loss": None if labels is None else self.reduce(scores, labels), "logits": scores}


def contrastive(scores: Tensor, _labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def noisy(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores + 0.3 * torch.randn_like(scores), labels)


NAMED = {"inputs": torch.randn(5, 4), "labels": torch.tensor([0, 1, 2, 2, 1])}


@pytest.mark.parametrize("num_samples", [1, 5])
@pytest.mark.parametrize("gives_labels", [True, False])
def test_a_loss_of_a_models_own_that_is_a_sum_is_refused_with_both_numbers(
    num_samples: int, gives_labels: bool
) -> None:
    batch = {name: tensor[:num_samples] for name, tensor in NAMED.items()}
    model: nn.Module = Reduced(lambda scores, labels: functional.cross_entropy(scores, labels, reduction="sum"))
    if not gives_labels:
        batch["classes"] = batch.pop("labels")
        model.forward = lambda inputs, classes: Reduced.forward(model, inputs, classes)  # type: ignore[method-assign]
    once = functional.cross_entropy(model.layer(NAMED["inputs"][:1]), NAMED["labels"][:1]).item()
    with pytest.raises(ConfigError) as caught:
        compare(Objective(model), batch)
    assert f"{once:.6f} for a sample and {2 * once:.6f}" in caught.value.message
    assert "training_loss" in caught.value.hint and "mean" in caught.value.hint


@pytest.mark.parametrize(
    "reduce",
    [functional.cross_entropy, contrastive, noisy, lambda scores, _: scores.sum() * 0, lambda scores, _: scores.mean()],
    ids=["mean", "contrastive", "random", "zero", "mean of values"],
)
@pytest.mark.parametrize("is_precise", [True, False])
def test_other_losses_of_a_models_own_are_no_sums(reduce: Any, is_precise: bool) -> None:
    compare(Objective(Reduced(reduce)), NAMED, tolerance=TOLERANCE if is_precise else LOW_TOLERANCE)


@pytest.mark.parametrize(
    ("training_loss", "is_said"),
    [
        (lambda losses: (losses.sum(), len(losses)), False),
        (lambda losses: (losses.mean() * len(losses), len(losses)), False),
        (lambda losses: (losses.mean(), 1), False),
        (lambda losses: (losses.sum() * 0, len(losses)), False),
        (lambda losses: (losses.sum() + len(losses) * torch.randn(()), len(losses)), False),
        (lambda losses: (torch.pdist(losses[:, None]).sum(), len(losses)), False),
        (lambda losses: (losses.view(7), 7), False),
        (lambda losses: (losses.mean(), len(losses)), True),
        (lambda losses: (losses.sum(), 1), True),
    ],
    ids=["sum", "mean * n", "mean, 1", "zero", "random", "pairs", "fails", "mean, n", "sum, 1"],
)
@pytest.mark.parametrize("has_lists", [False, True])
def test_a_training_loss_that_is_no_sum_with_its_count_is_named(
    training_loss: Any, is_said: bool, has_lists: bool
) -> None:
    class Own(nn.Module):
        def training_loss(self, batch: Any) -> tuple[Tensor, int]:
            assert not self.training
            return training_loss(torch.stack(list(batch[0])).square())

    torch.manual_seed(0)
    values = torch.tensor([3.0, 4.0, 5.0])
    batch: Any = ([*values], [*values]) if has_lists else (values, values)
    objective = Objective(Own())
    note = compare(objective, batch)
    assert (note is not None and "9.000000 and 1 items for a sample" in note) == is_said
    assert objective.model.training


def test_a_detectors_losses_that_are_sums_are_refused_too() -> None:
    class Detector(nn.Module):
        def __init__(self, reduction: str) -> None:
            super().__init__()
            self.reduction = reduction

        def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            errors = torch.stack([image.mean() - target["box"] for image, target in zip(images, targets, strict=True)])
            return {"loss_box": getattr(errors.square(), self.reduction)(), "loss_class": 0 * errors.sum()}

    batch: Any = ([torch.ones(3, 2, 2), torch.ones(3, 4, 4)], [{"box": torch.tensor(3.0)}, {"box": torch.tensor(0.0)}])
    compare(Objective(Detector("mean")), batch)
    with pytest.raises(ConfigError, match=r"4\.000000 for a sample and 8\.000000"):
        compare(Objective(Detector("sum")), batch)


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_speech_models_of_the_library_whose_loss_is_a_sum_are_refused_with_their_setting() -> None:
    torch.manual_seed(0)
    audio = {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 12, (2, 5))}
    with pytest.raises(ConfigError, match="Wav2Vec2ForCTC computes is a sum") as caught:
        compare(Objective(speech("Wav2Vec2ForCTC")), audio)
    assert "ctc_loss_reduction='mean'" in caught.value.hint
    compare(Objective(speech("Wav2Vec2ForCTC", ctc_loss_reduction="mean")), audio)
    model = speech("Wav2Vec2ForPreTraining")
    frames = int(model._get_feat_extract_output_lengths(800))
    masked = torch.zeros(2, frames, dtype=torch.bool)
    masked[:, 3:9] = True
    negatives = torch.randint(3, 9, (2, frames, 4))
    given = {"input_values": audio["input_values"], "mask_time_indices": masked, "sampled_negative_indices": negatives}
    with pytest.raises(ConfigError, match="Wav2Vec2ForPreTraining computes is a sum"):
        compare(Objective(model), given)


@pytest.mark.full
@NEEDS_TRANSFORMERS
@torch.no_grad()
def test_the_mean_of_a_speech_model_counts_samples_and_its_padding_counts_nothing() -> None:
    torch.manual_seed(0)
    model = speech("Wav2Vec2ForCTC", ctc_loss_reduction="mean", feat_extract_norm="layer").eval()
    lengths = [(800, 9), (700, 2), (600, 4), (790, 1)]
    samples = [{"input_values": torch.randn(audio), "labels": torch.randint(1, 12, (text,))} for audio, text in lengths]
    losses = [model(**{name: part[None] for name, part in sample.items()}).loss.item() for sample in samples]
    padding = padding_for(model)
    for cut_at in ([4], [2, 4], [1, 2, 3, 4], [3, 4]):
        parts = [samples[start:stop] for start, stop in zip([0, *cut_at], cut_at, strict=False)]
        loss = mean_of(Objective(model), [pad(part, padding=padding) for part in parts])
        assert loss == pytest.approx(sum(losses) / 4, rel=1e-5), cut_at
    assert not padding_for(speech("Wav2Vec2ForCTC")).adds_mask


def speech(kind: str, **words: Any) -> Any:
    """Returns a small Wav2Vec2 without anything random but its first weights."""
    import transformers

    none = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        codevector_dim=8,
        proj_codevector_dim=8,
        num_codevectors_per_group=4,
        layerdrop=0.0,
        apply_spec_augment=False,
        pad_token_id=0,
        **dict.fromkeys(none, 0.0),
        **words,
    )
    return getattr(transformers, kind)(config)


class Shifting(nn.Module):
    """A language model that computes its loss from labels, shifted or not."""

    def __init__(self, *, shifts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 9)
        self.shifts = shifts

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        scores, loss = self.embedding(tokens), None
        if labels is not None:
            pairs = (scores[:, :-1], labels[:, 1:]) if self.shifts else (scores, labels)
            loss = functional.cross_entropy(pairs[0].flatten(0, 1), pairs[1].flatten())
        return SimpleNamespace(loss=loss, logits=scores)


@pytest.mark.parametrize("shifts", [True, False])
def test_next_tokens_beside_the_inputs_agree_with_a_model_that_shifts_and_with_one_that_does_not(shifts: bool) -> None:
    tokens = torch.randint(0, 9, (3, 8))
    compare(Objective(Shifting(shifts=shifts)), (tokens[:, :-1], tokens[:, 1:]))


@pytest.mark.full
@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("kind", "words", "labels", "said"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}, [0, 1, 3], "labels are 0 to 3, and the model gives 3"),
        ("BertForTokenClassification", {"num_labels": 3}, [[0, -1], [2, 1], [0, 0]], "labels are -1 to 2"),
        ("BertForMaskedLM", {}, [[-100, 64], [2, 1], [0, 0]], "gives 64 scores"),
        ("BertForSequenceClassification", {"num_labels": 3}, [0, 2, -100], None),
        ("BertForSequenceClassification", {"num_labels": 1}, [4, 5, 6], None),
        ("BertForSequenceClassification", {"num_labels": 3}, [[1.0, 0.0, 5.0]] * 3, None),
        ("BertForMaskedLM", {}, [[-100, 63], [2, 1], [0, 0]], None),
    ],
)
def test_labels_without_a_score_are_refused_before_the_library_scores_them(
    kind: str, words: dict[str, Any], labels: list[Any], said: str | None
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = getattr(transformers, kind)(transformers.BertConfig(vocab_size=64, **sizes, **words))
    objective = Objective(model)
    batch = {"input_ids": torch.ones(3, 2, dtype=torch.int64), "labels": torch.tensor(labels)}
    if said is None:
        objective.choose(batch).check_batch(batch)
        return
    with pytest.raises(ConfigError, match=said):
        objective.choose(batch).check_batch(batch)


@pytest.mark.full
@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("BertForSequenceClassification", {}),
        ("RobertaForSequenceClassification", {"pad_token_id": 1}),
        ("BertLMHeadModel", {}),
        ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
        ("GPT2ForSequenceClassification", {"pad_token_id": 63}),
        ("LlamaForCausalLM", {"pad_token_id": 2}),
        ("MixtralForCausalLM", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    ],
)
@torch.no_grad()
def test_what_pads_a_sample_changes_no_loss(kind: str, words: dict[str, Any]) -> None:
    """The loss of samples of unequal length is that of each of them alone, which needs no padding."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    kinds = {"T5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}}
    kinds["GPT2"] = {"n_embd": 32, "n_layer": 2, "n_head": 2, **dict.fromkeys(("resid_pdrop", "attn_pdrop"), 0.0)}
    kinds["Mixtral"] = {**sizes, "num_key_value_heads": 2, "num_local_experts": 4}
    name = next((name for name in kinds if kind.startswith(name)), "")
    config_class = getattr(transformers, kind).config_class
    range_of = {"initializer_factor": 8.0} if name == "T5" else {"initializer_range": 0.3}
    model = getattr(transformers, kind)(config_class(vocab_size=64, **kinds.get(name, sizes), **range_of, **words))
    model.eval()
    rows = [torch.randint(5, 60, (length,)).tolist() for length in (9, 3, 6, 4)]
    is_text = not kind.endswith("SequenceClassification")
    samples = [{"input_ids": row, "labels": row if is_text else len(row) % 2} for row in rows]
    objective = Objective(model)
    alone = mean_of(objective, [pad([sample]) for sample in samples])
    if name == "Mixtral":
        # Routers are balanced over all tokens of a micro-batch, so the mean of samples alone is another loss.
        assert padding_for(model).adds_mask
        return
    assert mean_of(objective, [pad(samples, padding=padding_for(model))]) == pytest.approx(alone, rel=1e-5)
    assert ("attention_mask" in pad(samples, padding=padding_for(model))) == (kind != "LlamaForCausalLM")


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_next_tokens_as_labels_of_a_model_that_shifts_are_refused() -> None:
    tokens = batch_of("causal")["input_ids"]
    for kind in ("causal", "decoder that does not shift"):
        objective, batch = Objective(build(kind=kind)), {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
        objective.choose(batch).check_batch(batch)
        compare(objective, batch)
        if kind == "causal":
            with pytest.raises(ConfigError, match="the labels are the next tokens already, and LlamaForCausalLM"):
                objective.call.agree([objective.call.repeats])
        else:
            assert objective.call.agree([objective.call.repeats]) is None


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_the_routers_of_a_mixture_count_with_tuples_too() -> None:
    model, batch = build(kind="mixture of experts").eval(), batch_of("mixture of experts")
    tokens = batch["input_ids"]
    objective, pair = Objective(model), (tokens[:, :-1], tokens[:, 1:])
    compare(objective, pair)
    outputs = model(tokens[:, :-1])
    plain = functional.cross_entropy(outputs.logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected = (plain + 5.0 * outputs.aux_loss).item()
    assert mean_of(objective, [pair]) == pytest.approx(expected, rel=1e-6)
    sums = objective.evaluation_sums(pair)
    assert (sums["loss"] / sums["count"]).item() == pytest.approx(expected, rel=1e-6)


def test_whether_labels_repeat_the_inputs_is_said_by_all_ranks_together() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return functional.one_hot(input_ids, 5).float()

    for told, shifts in (([True, None, True], True), ([True, False], False), ([None, None], True)):
        objective = Objective(Plain())
        note = objective.call.agree(told)
        assert (note is not None) == (told[0] is not None and shifts)
        tokens = torch.ones(2, 4, dtype=torch.int64)
        assert objective({"input_ids": tokens, "labels": tokens})[1] == (6 if shifts else 8)


@pytest.mark.parametrize("stored", [None, {"output_router_logits": False}, {"output_router_logits": True}])
def test_a_scale_of_a_routers_loss_that_is_not_computed_is_refused(tmp_path: Path, stored: Any) -> None:
    config, path = {"router_aux_loss_coef": 0.01}, None
    if stored is not None:
        (tmp_path / "config.json").write_text(json.dumps(stored))
        path = str(tmp_path)
    require_effect({**config, "output_router_logits": True}, path=path, cwd=tmp_path)
    if stored == {"output_router_logits": True}:
        require_effect(config, path=path, cwd=tmp_path)
        return
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.01, which has no effect: output_router"):
        require_effect(config, path=path, cwd=tmp_path)


@pytest.mark.full
@NEEDS_TRANSFORMERS
@torch.no_grad()
def test_texts_end_where_the_models_table_of_positions_does() -> None:
    model = build(kind="masked").eval()
    objective, context = Objective(model), model.config.max_position_embeddings
    tokens = torch.randint(3, 30, (3, context + 4))
    mask = torch.ones_like(tokens)
    mask[0, context:] = 0
    batch: Any = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}
    assert objective.call.num_too_long(batch) == 2
    short: Any = {name: tensor[:, :context].contiguous() for name, tensor in batch.items()}
    assert objective.call.num_too_long(short) == 0
    assert mean_of(objective, [batch]) == pytest.approx(model(**short).loss.item(), rel=1e-6)
    assert objective.evaluation_sums(batch)["count"] == 3 * context
    # Rotary positions have no table.
    assert Objective(build(kind="causal")).call.own_loss.context is None
