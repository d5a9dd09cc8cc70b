"""Any causal language model of the transformers library, from its configuration or from a directory with weights.

The library is imported when a model is built, and not before: it is the extra `hf`. Nothing is ever downloaded, and no
code that comes with weights is run.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.errors import ConfigError
from slurm_train.models.first_weights import (
    NeedsMemoryError,
    begin_with,
    gives_init_weights,
    has_first_values,
    is_without_memory,
    stored_tensors,
)
from slurm_train.models.own_loss import scores_in
from slurm_train.models.pretrained_names import CONFIG_FILE, require_adapters, require_effect, require_source
from slurm_train.models.sampling import sample

PREFIX = "network."
"""Of the names of a `CausalLM`'s parameters, before those that transformers gives them."""
_WAYS = ("colwise", "rowwise")
# Former names of rope_parameters, which the library still takes.
_FORMER_KEYS = ("rope_theta", "rope_scaling")
_COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class CausalLM(nn.Module):
    """A causal language model of transformers: token ids in, logits out, and where it may be cut, as data.

    Args:
        network: the library's model, e.g. a LlamaForCausalLM.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Returns the logits of the next token at every position, (B, T, V).

        With labels, and of a mixture whose routers have a loss, it is the library's output: `loss`, `logits`, ...

        Args:
            input_ids: int64 (B, T).
            attention_mask: (B, T), 0 at padding.
            position_ids: int64 (B, T).
            labels: int64 (B, T), the tokens themselves; -100 where one does not count.
            num_items_in_batch: what the loss is divided by, in place of the number of labels that count.
        """
        words = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
            "num_items_in_batch": num_items_in_batch,
        }
        given = {name: tensor for name, tensor in words.items() if tensor is not None}
        outputs = self.network(input_ids=input_ids, use_cache=False, **given)
        has_loss = labels is not None or getattr(outputs, "aux_loss", None) is not None
        return outputs if has_loss else outputs.logits

    def init_weights(self, name: str, part: Tensor) -> None:
        """Gives LoRA's adapters the values that peft gives them; other weights come from files.

        Args:
            name: of a parameter.
            part: rows of it, which are changed in place.
        """
        if _is_plain_adapter(name, part, letter="A"):
            nn.init.kaiming_uniform_(part, a=math.sqrt(5))
        elif _is_plain_adapter(name, part, letter="B"):
            nn.init.zeros_(part)

    def generate(self, tokens_BT: Tensor, **sampling: Any) -> Tensor:
        """Returns the given tokens followed by sampled ones; see `sample`."""
        context = getattr(self.network.config, "max_position_embeddings", None)

        def score(tokens_BT: Tensor) -> Tensor:
            logits_BTV: Tensor = scores_in(self(tokens_BT))
            return logits_BTV

        return sample(score, tokens_BT, context=context, **sampling)

    def sharding_plan(self) -> tuple[str, ...]:
        """Returns the names of the decoder's blocks: what the library marks as not to be split, else module lists."""
        whole = set(getattr(self.network, "_no_split_modules", None) or ())
        blocks = [name for name, module in self.named_modules() if type(module).__name__ in whole]
        if blocks:
            return tuple(blocks)
        lists = [name for name, module in self.named_modules() if isinstance(module, nn.ModuleList)]
        return tuple(f"{name}.*" for name in lists if not any(name.startswith(f"{other}.") for other in lists))

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Returns which matrices may be cut, from the library's own plan for the architecture.

        Embedding, norms and head stay whole.

        Raises:
            ConfigError: there is no plan, or one that asks for more than whole matrices cut by outputs and inputs.
        """
        kind = self.network.config.model_type
        if hasattr(self.network, "peft_config"):
            raise _no_plan(kind, "model.lora puts adapters around its matrices")
        plan = dict(getattr(self.network.config, "base_model_tp_plan", None) or {})
        if not plan:
            raise _no_plan(kind, "transformers has no tensor parallel plan for it")
        other = sorted({str(way) for way in plan.values() if way not in _WAYS})
        if other:
            raise _no_plan(kind, f"its plan in transformers has the ways {', '.join(other)}, which are not known here")
        ways = {f"{PREFIX}{self.network.base_model_prefix}.{pattern}": way for pattern, way in plan.items()}
        left = self._left_between(ways)
        if left:
            raise _no_plan(kind, f"its plan in transformers leaves {left} whole between matrices that are cut")
        return ways

    def tensor_parallel_counts(self) -> dict[str, int]:
        """Returns the numbers that tensor parallelism must be able to divide."""
        config = self.network.config
        counts = {f"model.config.{name}": getattr(config, name, None) for name in _COUNTS}
        return {name: count for name, count in counts.items() if isinstance(count, int)}

    def attention_width(self) -> int:
        """Returns the widths of all layers together, for the operations per token; 0 where the architecture differs."""
        config = self.network.config
        return getattr(config, "num_hidden_layers", 0) * getattr(config, "hidden_size", 0)

    def _left_between(self, plan: Mapping[str, str]) -> str:
        """Returns a parameter in the same modules as cut matrices that is not cut, "" where there is none.

        It would get a gradient from a part of the heads only.
        """
        patterns = [re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")) for pattern in plan]
        cut = {name for name, _ in self.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)}
        parents = tuple(sorted({f"{name.rpartition('.')[0]}." for name in cut}))
        neighbours = (name for name, _ in self.named_parameters() if name.startswith(parents))
        return next((name for name in neighbours if name.rpartition(".")[0] not in cut), "")


@gives_init_weights
def causal_lm(
    *,
    model_type: str | None = None,
    path: str | None = None,
    config: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
) -> CausalLM:
    """Returns a model in float32.

    Args:
        model_type: transformers' name of an architecture, e.g. "llama"; its weights are drawn at random.
        path: instead of it, a directory with config.json and safetensors, or the path of a config.json alone, whose
            weights are drawn at random.
        config: values of the architecture's configuration, in place of its defaults or of the file's.
        lora: arguments of peft's LoraConfig, e.g. `{r: 16}`: only these adapters are trained, the weights are frozen.

    Raises:
        ConfigError: transformers or peft is missing or does not know the architecture or a key, or the directory lacks
            files.
    """
    library = require_transformers()
    settings = pretrained_config(model_type=model_type, path=path, config=config)
    if path is None or Path(path).is_file():
        if is_without_memory():
            raise NeedsMemoryError("transformers draws the weights of whole models")
        return CausalLM(with_adapters(build_network(settings), lora).train())
    if not any(Path(path).glob("model*.safetensors")):
        raise ConfigError(
            f"model.path={path} holds no model.safetensors",
            hint=f"for weights drawn at random name the file: model.path={Path(path) / CONFIG_FILE}",
        )
    if is_without_memory():
        network = build_network(settings)
        _begin_with_files(network, Path(path))
        network = with_adapters(network, lora)
        _require_plain_adapters(network)
        return CausalLM(network.train())
    network = library.AutoModelForCausalLM.from_pretrained(
        path, config=settings, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    return CausalLM(with_adapters(network, lora).train())


def _begin_with_files(network: Any, path: Path) -> None:
    """Lets each rank read its part of the files, where they have the network's own names.

    Raises:
        NeedsMemoryError: transformers would rename, merge or unpack what is in the files.
    """
    stored = stored_tensors(path)
    parameters = dict(network.named_parameters())
    names = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    has_same_names = parameters.keys() <= stored.keys() <= names and names == network.state_dict().keys()
    if not has_same_names or getattr(network.config, "quantization_config", None) is not None:
        raise NeedsMemoryError(f"transformers converts what is in {path}")
    for name, parameter in parameters.items():
        if parameter.shape != stored[name].shape:
            raise NeedsMemoryError(f"{name} has another shape in {path}")
        begin_with(parameter, stored[name])


def _require_plain_adapters(network: Any) -> None:
    """Checks that `CausalLM.init_weights` knows the first values of everything that no file has.

    Raises:
        NeedsMemoryError: peft computes some of them in another way.
    """
    drawn = [(name, parameter) for name, parameter in network.named_parameters() if not has_first_values(parameter)]
    for name, parameter in drawn:
        way = network.peft_config["default"].init_lora_weights
        is_plain = any(_is_plain_adapter(name, parameter, letter=letter) for letter in "AB")
        if way is not True or not is_plain:
            raise NeedsMemoryError(f"peft gives {name} its values (init_lora_weights={way})")


def _is_plain_adapter(name: str, part: Tensor, *, letter: str) -> bool:
    """Returns whether a parameter is one of the two matrices that LoRA puts beside a linear layer."""
    return f".lora_{letter}." in name and name.endswith(".weight") and part.dim() == 2


def with_adapters(network: nn.Module, lora: Mapping[str, Any] | None) -> Any:
    """Returns a network with LoRA adapters of peft in it and all else frozen; itself where none are asked.

    Args:
        network: of transformers.
        lora: arguments of peft's LoraConfig.

    Raises:
        ConfigError: peft is missing, or does not take the arguments for this architecture.
    """
    require_adapters(lora)
    if lora is None:
        return network
    try:
        import peft
    except ImportError as err:
        raise ConfigError(
            f"model.lora was given, but peft cannot be imported: {err}", hint="pip install 'slurm-train[lora]'"
        ) from err
    try:
        with warnings.catch_warnings():
            # The two libraries are a release apart now and then, and say so on every rank.
            warnings.simplefilter("ignore", FutureWarning)
            # peft changes lists that it is given.
            arguments = {"task_type": "CAUSAL_LM", **copy.deepcopy(dict(lora))}
            return peft.get_peft_model(network, peft.LoraConfig(**arguments))
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"peft does not take model.lora={dict(lora)}: {_last_line(err)}",
            hint="its keys are those of peft's LoraConfig, e.g. {r: 16, lora_alpha: 32, target_modules: all-linear}",
        ) from err


def build_network(config: Any) -> nn.Module:
    """Returns transformers' model of a configuration with random weights, in float32, on the default device.

    Raises:
        ConfigError: the architecture is no causal language model.
    """
    library = require_transformers()
    try:
        network: nn.Module = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as err:
        raise ConfigError(
            f"transformers has no causal language model of type {config.model_type}: {_last_line(err)}",
            hint="choose another model.model_type, e.g. llama, or name the class: model._target_=my_package.MyModel",
        ) from err
    return network


def pretrained_config(*, model_type: str | None, path: str | None, config: Mapping[str, Any] | None) -> Any:
    """Returns the library's configuration object; arguments as for `causal_lm`.

    Raises:
        ConfigError: as `causal_lm`.
    """
    library = require_transformers()
    changes = dict(config or {})
    require_source(model_type=model_type, path=path, cwd=Path())
    require_effect(changes, path=path, cwd=Path())
    make = partial(library.AutoConfig.from_pretrained, path, local_files_only=True)
    if model_type is not None:
        make = partial(library.AutoConfig.for_model, model_type)
    try:
        _require_keys(make(), changes)
        return make(**changes)
    except ConfigError:
        raise
    except Exception as err:  # the library's checks raise classes of several other libraries
        raise ConfigError(
            f"transformers does not take the model's configuration: {_last_line(err)}",
            hint="compare model.model_type, model.path and model.config with transformers' pages of the architecture",
        ) from err


def require_transformers() -> Any:
    """Returns the library, its messages switched off.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as err:
        raise ConfigError(
            f"transformers was asked for and cannot be imported: {err}", hint="pip install 'slurm-train[hf]'"
        ) from err
    # Every rank would write the same into its log.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _require_keys(config: Any, changes: Mapping[str, Any]) -> None:
    """Refuses a key that the architecture does not have: the library would keep it and pass it over."""
    for key in changes:
        if not hasattr(config, key) and key not in _FORMER_KEYS:
            names = [*config.to_dict(), *getattr(config, "attribute_map", {})]
            near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
            raise ConfigError(
                f"model.config has {key!r}, which the architecture {config.model_type} does not know",
                hint=f"did you mean {' or '.join(near)}?" if near else f"it knows {', '.join(sorted(names))}",
            )


def _no_plan(kind: str, reason: str) -> ConfigError:
    return ConfigError(
        f"parallel.tp was asked, but {kind} cannot be cut: {reason}",
        hint="leave parallel.tp at 1; parallel.dp_shard spreads any model",
    )


def _last_line(err: Exception) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(err).__name__
