"""What a run needs on the machine that starts it: data, weights, packages, and names that `_target_` refers to.

`refuse_missing_inputs` finds missing inputs before anything is written or submitted. `fetch_inputs` also fetches the
files that the run reads from the Hub. Only the cache of the Hub is changed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.code.hub import fetch_hub_files
from slurm_train.config.data_kinds import DIGITS, kind_of
from slurm_train.config.program import program_of
from slurm_train.config.schema import CAUSAL_LM, GPT_TARGET, OptimSection, RunConfig
from slurm_train.config.target import TARGET, keywords_in_source, require_target
from slurm_train.data.check import require_readable
from slurm_train.data.file_kind import require_content
from slurm_train.errors import ConfigError
from slurm_train.models.pretrained_names import num_token_ids, require_adapters, require_effect, require_source
from slurm_train.plan.plan import RunPlan
from slurm_train.rundir.files import read_json

_CNN = "slurm_train.models.cnn.CNN"
_INDEX_FILE = "model.safetensors.index.json"


def fetch_inputs(plan: RunPlan, *, cwd: Path, say: Callable[[str], None]) -> None:
    """Fetches the files that a run reads from the Hub, and refuses other missing inputs.

    Args:
        plan: the run.
        cwd: the folder that the words were typed in.
        say: prints a line for the person: what is fetched.

    Raises:
        DataError: as `refuse_missing_inputs`.
        ConfigError: as `refuse_missing_inputs`, or files cannot be fetched.
    """
    # Inputs that do not depend on these files are checked before a long download.
    refuse_missing_inputs(plan, cwd=cwd)
    for files in plan.hub:
        if files.missing:
            say(f"{files.key}: {files.words}")
            fetch_hub_files([files])
    refuse_missing_inputs(plan, cwd=cwd)


def refuse_missing_inputs(plan: RunPlan, *, cwd: Path) -> None:
    """Refuses data that cannot be read, a `_target_` that does not exist and missing packages, as far as possible.

    Files of the Hub that are still to be fetched do not count as missing, and checks that need them are skipped.

    Raises:
        DataError: prepared text is configured, and there is none; or weights were not downloaded.
        ConfigError: a `_target_` names a module or a name that does not exist, or a package is not installed.
    """
    awaited = {files.key for files in plan.hub if files.missing}
    _require_model_and_data(plan.program.used, awaited=awaited, cwd=cwd)
    require_targets(plan.config, folders=[cwd])


def uses_this_python(config: RunConfig) -> bool:
    """Returns whether the ranks use this interpreter, so that a package that is missing here is missing for them."""
    return config.slurm.python is None


def _require_model_and_data(config: RunConfig, *, awaited: Collection[str], cwd: Path) -> None:
    model = config.model or {}
    if config.train.evaluate_from is None:
        _require_fit(model, config.data or {})
    if model.get("_target_") == CAUSAL_LM:
        require_adapters(model.get("lora"))
        if "model.path" not in awaited:
            require_source(model_type=model.get("model_type"), path=model.get("path"), cwd=cwd)
            require_effect(model.get("config") or {}, path=model.get("path"), cwd=cwd)
            if model.get("path"):
                _require_downloaded(cwd / model["path"])
        if uses_this_python(config) and importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                "model=hf needs transformers, which is not installed", hint="pip install 'slurm-train[hf]'"
            )
    if not {"model.path", "data.tokenizer"} & set(awaited):
        require_readable(config.data or {}, vocab_size=num_token_ids(model, cwd=cwd), cwd=cwd)
    if config.train.precision == "fp8" and uses_this_python(config) and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "train.precision=fp8 needs torchao, which is not installed", hint="pip install 'slurm-train[fp8]'"
        )
    weights = config.train.init_from
    if weights is None or "train.init_from" in awaited:
        return
    if not (cwd / Path(weights).expanduser()).exists():
        raise ConfigError(
            f"train.init_from={weights} is not there",
            hint="name a directory with config.json and model.safetensors, one safetensors file, or a repository "
            "of the Hub: org/name",
        )
    _require_downloaded(cwd / Path(weights).expanduser())


def _require_fit(model: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Refuses an included model for data that ship with this package and that it cannot read."""
    model_target = model.get("_target_")
    kind = kind_of(data)
    if model_target in (GPT_TARGET, CAUSAL_LM) and kind is DIGITS:
        hint = "take model=cnn, e.g. by +experiment=digits, or text: data=stdlib, data=text, data=hf"
        raise ConfigError("the model reads tokens, and data=digits gives images", hint=hint)
    if model_target == _CNN and kind.is_text:
        hint = (
            "take images, e.g. data=digits (+experiment=digits chooses both), or a model of text: model=gpt, model=hf"
        )
        raise ConfigError("model=cnn reads images, and the data are text", hint=hint)


def _require_downloaded(weights: Path) -> None:
    """Looks for files of weights, and at their beginning: a clone without Git LFS has a few lines in place of each.

    Raises:
        DataError: such a file was not downloaded.
        ConfigError: the index names a file that is not there, as after a download that was cut off.
    """
    if weights.is_file():
        require_content(weights)
        return
    names = set(((read_json(weights / _INDEX_FILE) or {}).get("weight_map") or {}).values())
    missing = sorted(name for name in names if not (weights / name).is_file())
    if missing:
        raise ConfigError(
            f"{weights} lacks {len(missing)} of the {len(names)} files that {_INDEX_FILE} names, e.g. {missing[0]}",
            hint="download the rest: `hf download org/name --local-dir DIR` gets what is missing",
        )
    for file in sorted(weights.glob("*.safetensors")):
        require_content(file)


def require_targets(config: RunConfig, *, folders: Sequence[Path]) -> None:
    """Refuses a `_target_` that does not exist or does not take its keywords, as far as its source tells.

    Args:
        config: of the run.
        folders: where the ranks look before the places of this Python: the person's folder, or the copy of it.

    Raises:
        ConfigError: the first that is wrong.
    """
    program = program_of(config)
    used = program.used
    targets = dict(program.built)
    for number, callback in enumerate(used.callbacks):
        targets[f"callbacks[{number}]"] = callback
    # If ranks use another Python, torch may be installed only there.
    if importlib.util.find_spec("torch") is not None:
        targets |= _optimizer_calls(used.optim)
    collate = (used.data or {}).get("collate")
    if isinstance(collate, str):
        targets["data.collate"] = {"_target_": collate, "_args_": [None]}
    elif isinstance(collate, Mapping):
        targets["data.collate"] = dict(collate)
    search = [*map(str, folders), *sys.path]
    judges_syntax = config.container is None and uses_this_python(config)
    _refuse_schedulers(used.optim, search=search)
    for key, mapping in targets.items():
        require_target(key, mapping, search=search, judges_syntax=judges_syntax)


def _refuse_schedulers(optim: OptimSection, *, search: Sequence[str]) -> None:
    """Refuses a scheduler of torch, transformers or timm, which changes an optimizer, as `optim.schedule`.

    Raises:
        ConfigError: it is one: it takes an optimizer.
    """
    if not isinstance(optim.schedule, dict):
        return
    target = str(optim.schedule.get(TARGET, ""))
    # transformers imports its functions when they are asked for, which its source does not show.
    is_of_transformers = re.fullmatch(r"transformers\..*\bget_\w*schedule\w*", target) is not None
    if not is_of_transformers and "optimizer" not in (keywords_in_source(target, search=search) or ()):
        return
    raise ConfigError(
        f"optim.schedule._target_={target} takes an optimizer and sets its rate; a schedule here is a function of the "
        "samples so far, which gives the rate as a multiple of optim.lr",
        hint="choose cosine, linear, constant, wsd or inverse_sqrt, or write "
        "def my_schedule(samples, *, warmup_samples, total_samples): return factor (docs/optimizers.md)",
    )


def _optimizer_calls(optim: OptimSection) -> dict[str, Mapping[str, Any] | None]:
    """Returns by key the arguments of the optimizer's classes and of a schedule of the user."""
    common: dict[str, Any] = {"_target_": optim._target_, "_args_": [None]}
    arguments: dict[str, Mapping[str, Any] | None] = {}
    # The default optimizer without further keywords exists in every torch.
    if optim.keywords or optim._target_ != OptimSection()._target_:
        arguments["optim"] = {**common, "lr": optim.lr, **optim.keywords}
    for index, rule in enumerate(optim.rules()):
        target = optim._target_ if rule._target_ is None else rule._target_
        arguments[f"optim.groups[{index}]"] = {**common, "_target_": target, **rule.keywords}
    if isinstance(optim.schedule, dict):
        passed = {"_args_": [0], "warmup_samples": 0, "total_samples": 0}
        arguments["optim.schedule"] = {"_target_": None, **optim.schedule, **passed}
    return arguments
