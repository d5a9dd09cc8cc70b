"""Writes docs/configuration.md from the schema's docstrings and the shipped YAML files.

    python .ci/write_configuration_page.py            # writes the page
    python .ci/write_configuration_page.py --check    # says whether it is up to date

Meanings and types come from slurm_train/config/schema.py, defaults from conf/: what a person gets who sets nothing.
"""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "configuration.md"
CONF = REPOSITORY / "conf"
SCHEMA = REPOSITORY / "slurm_train" / "config" / "schema.py"
IDENTITY = REPOSITORY / "slurm_train" / "config" / "frozen.py"

# Keys of the whole that stand outside the sections; they have no docstring of their own in the schema.
ROOT_MEANINGS = {
    "seed": "Seed of everything random: weights, order of the samples, augmentation, dropout",
    "model": "The model: a group (`model=gpt`) or `model._target_=my_package.MyModel`; see below",
    "data": "The data: a group (`data=stdlib`) or `data._target_=my_package.MyData`; see below",
    "launch": "slurm: as a job; interactive: in an salloc, yours or a new one; local: here, even with a cluster",
    "site": "`site=NAME`: a file with your cluster's partition, account and so on; `init` writes it",
    "notify": "Who is told that the run has finished, failed for good, hung, or was requeued again and again: "
    "commands, or webhooks as `file:PATH` or `env:NAME`: [being told](watching.md#being-told)",
    "callbacks": "Code that is called at moments of the training, a list of `_target_`s: [callbacks](callbacks.md)",
    "task": "`task._target_=my_package.main`: your function on every rank instead of the trainer",
    "script": "`script=[train.py,--flag]`: your script on every rank instead of the trainer",
}

HEAD = """\
# Configuration

Written by `.ci/write_configuration_page.py` from `slurm_train/config/schema.py` and `conf/`; do not edit it by hand.

Settings are given on the command line as `key=value`. Units are in the names: `_s` seconds, `_min` minutes, `_mb` and
`_gb` MiB and GiB; steps are optimizer steps, samples are counted over all ranks.

    python -m slurm_train +cluster=4x8 optim.lr=3e-4 train.max_steps=1000
    python -m slurm_train --cfg job                    # print every key with its value and do nothing

| setting | meaning |
|---|---|
| `key=value` | sets an existing key; an unknown key is refused, with the nearest names |
| `model=NAME`, `data=NAME`, `optim=NAME` | selects a file of `conf/model/`, `conf/data/` or `conf/optim/` |
| `+experiment=NAME` | adds a file of `conf/experiment/`, which has several settings |
| `+cluster=NxG` | runs through Slurm on N nodes with G GPUs each; any N and G, N also [a range](nodes.md) |
| `container=apptainer`, `container=pyxis` | runs the Python of the ranks [in an image](interactive.md#containers) |
| `site=NAME` | uses the settings of one cluster: see [site profiles](site-profiles.md) |
| `+model.KEY=value`, `+data.KEY=value`, `+optim.KEY=value` | adds a keyword that the selected file does not have |
| `model._target_=...`, `data._target_=...`, `optim._target_=...` | uses your own class, without keywords of a file |
| `key=null` | no value; the tables below say what this means |
| `"key=[a,b]"` | a list; quote it because of the shell |
| `cluster.env.NAME=value`, `cluster.sbatch.FLAG=value`, `cluster.srun.FLAG=value` | sets one entry of a mapping |
| `cluster.time=4:00:00` | `cluster.time_limit_min=240` in Slurm's formats (minutes, HH:MM:SS, D-HH:MM:SS) |
| `--config-dir DIR` | a folder with your own YAML files; a file with the name of an included one replaces it |
| `--config-name NAME` | a primary file other than `config.yaml` |

Put the values of your site into a file, not into every command. `init` [writes such a file](site-profiles.md) for your
cluster. You can also change the defaults for all clusters with your own base file, `my_conf/cluster/base.yaml`:

```yaml
nodes: 1
gpus_per_node: 1
partition: gpu
account: my_project
time_limit_min: 720
network_interface: ib0
env: {NCCL_DEBUG: WARN}
setup: ["module load cuda/12.4"]
```

    mkdir -p my_conf/cluster
    python -m slurm_train --config-dir my_conf +cluster=4x8

Your file replaces the included file completely: keys that it does not have get the defaults of the schema (for
`cluster` these are the same). `+cluster=big` selects `my_conf/cluster/big.yaml`, which begins with
`defaults: [base, _self_]`.

A file gives texts, variables and flags as they are written, without quotes, too: `account: 0123`, `START: 1:30` and
`comment: 1e3` arrive so, whatever YAML makes of them. Also `time: 12:00:00` in Slurm's formats may be written there.
Refused are words with two meanings (`~` for a variable, `yes` for a flag of Slurm) and times and octals below a key
that counts (`time_limit_min: 12:00:00`, `max_steps: 0100`).

## Which keys change the run id

The run id is a hash of what is trained. The same command twice selects the same run: its result is shown, it is
continued, or the command reports that it is active. The following keys are not part of the hash, so a run can continue
at another size or with other settings for logs and checkpoints:
{not_identity}.

The global batch is part of the hash, but not how it is split. For a `script=` or `task` run, the hash has only `seed`,
`task` and `script`.
"""

GROUPS = """\
## The included models, data sets, optimizers and experiments

Their keys are the keyword arguments of the class or function in `_target_`; unknown keys are refused.
"""


class Key(NamedTuple):
    """One row of the page."""

    name: str
    kind: str
    meaning: str


class Section(NamedTuple):
    """One dataclass of the schema."""

    name: str
    meaning: str
    keys: list[Key]


def read_sections() -> list[Section]:
    """Returns the root's own keys as the first section, then the sections in the order of the schema."""
    tree = ast.parse(SCHEMA.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "Literal" in ast.unparse(node)
    }
    root: list[Key] = []
    sections: list[Section] = []
    for field, meaning in _fields(classes["RunConfig"]):
        kind = ast.unparse(field.annotation)
        name, kind = _name_of(field), aliases.get(kind, kind)
        section = classes.get(kind.removesuffix(" | None"))
        if section is None:
            root.append(Key(name, _kind_in_words(kind), meaning or ROOT_MEANINGS[name]))
        else:
            keys = list(_keys(name, section, classes, aliases))
            sections.append(Section(name, (ast.get_docstring(section) or "").replace("\n", " "), keys))
    return [Section("", "", root), *sections]


def _keys(name: str, section: ast.ClassDef, classes: dict[str, ast.ClassDef], aliases: dict[str, str]) -> Iterator[Key]:
    """Yields the keys of a section, those of sections in it with their whole names."""
    for field, text in _fields(section):
        inner = classes.get(ast.unparse(field.annotation))
        if _name_of(field) == "keywords":
            continue
        if inner is None:
            yield _key(name, field, text, aliases)
        else:
            yield from _keys(f"{name}.{_name_of(field)}", inner, classes, aliases)


def _fields(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    for index, statement in enumerate(node.body):
        if isinstance(statement, ast.AnnAssign):
            following = node.body[index + 1] if index + 1 < len(node.body) else None
            yield statement, _text_of(following)


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _key(section: str, field: ast.AnnAssign, meaning: str, aliases: dict[str, str]) -> Key:
    name, kind = f"{section}.{_name_of(field)}", ast.unparse(field.annotation)
    assert meaning, f"{name} has no docstring in {SCHEMA}"
    return Key(name, _kind_in_words(aliases.get(kind, kind)), meaning)


def _name_of(field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name)
    return field.target.id


_WORDS = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true, false",
    "list[int]": "list of whole numbers",
    "list[float]": "list of numbers",
    "list[str]": "list of strings",
    "list[dict[str, Any]]": "list of mappings",
    "dict[str, Any]": "mapping",
    "dict[str, Count]": "mapping of whole numbers from 1",
    "Count": "whole number from 1",
    "Degree": "whole number from 1, -1",
    "Positive": "number above 0",
    "list[Count]": "list of whole numbers from 1",
    "Whole": "whole number from 0",
    "Amount": "number from 0",
    "Share": "number from 0 to 1",
    "list[Amount]": "list of numbers from 0",
    "Annotated[float, Bound(1, is_open=True)]": "number above 1",
}


def _kind_in_words(annotation: str) -> str:
    options = [option.strip() for option in annotation.split("|")]
    words = [_one_kind(option) for option in options if option != "None"]
    return " or ".join(words) + (", null" if "None" in options else "")


def _one_kind(option: str) -> str:
    if option.startswith("Literal["):
        return ", ".join(ast.literal_eval(f"[{option[len('Literal[') : -1]}]"))
    return _WORDS[option]


def read_defaults() -> dict[str, Any]:
    """Returns every key's default as shipped, by its dotted name."""
    shipped = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    groups = {key: value for item in shipped["defaults"] if isinstance(item, dict) for key, value in item.items()}
    flat = {**groups, "cluster": None, "container": None}
    shipped["optim"] = yaml.safe_load((CONF / "optim" / "adamw.yaml").read_text(encoding="utf-8"))
    # "${oc.select:model._lr_,3.0e-3}": what it is where the model's file says nothing.
    shipped["optim"]["lr"] = float(shipped["optim"]["lr"].rpartition(",")[2].rstrip("}"))
    for section, values in shipped.items():
        if isinstance(values, dict):
            flat |= _flat(values, f"{section}.")
        elif section not in ("defaults", "cluster", "container"):
            flat[section] = values
    base = yaml.safe_load((CONF / "cluster" / "base.yaml").read_text(encoding="utf-8"))
    container = yaml.safe_load((CONF / "container" / "apptainer.yaml").read_text(encoding="utf-8"))
    flat |= {f"container.{key}": value for key, value in container.items()}
    return flat | {f"cluster.{key}": value for key, value in base.items()}


def _flat(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat


def render() -> str:
    """Returns the text of the page."""
    defaults = read_defaults()
    parts = [HEAD.replace("{not_identity}", _not_identity())]
    for section in read_sections():
        title = f"`{section.name}`: {section.meaning.rstrip('.')}" if section.name else "Top-level keys"
        header = ["| key | default | values | meaning |", "|---|---|---|---|"]
        rows = [_row(key, defaults) for key in section.keys]
        parts.append("\n".join([f"## {title}\n", *header, *rows, ""]))
    parts.append(GROUPS)
    parts += [
        _group(path)
        for folder in ("model", "data", "optim", "experiment", "container")
        for path in sorted((CONF / folder).iterdir())
    ]
    return "\n".join(parts)


def _row(key: Key, defaults: dict[str, Any]) -> str:
    cells = [f"`{key.name}`", f"`{_value(defaults[key.name])}`", key.kind, key.meaning.rstrip(".")]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _not_identity() -> str:
    tree = ast.parse(IDENTITY.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NOT_IDENTITY":
            names: tuple[str, ...] = ast.literal_eval(node.value)
            return _wrap(
                [f"`{name}`" + ("" if "." in name or name in ROOT_MEANINGS else " (all of it)") for name in names]
            )
    raise AssertionError(f"no NOT_IDENTITY in {IDENTITY}")


def _wrap(items: list[str], width: int = 110) -> str:
    lines = [""]
    for item in items[:-1]:
        if len(lines[-1]) + len(item) > width:
            lines.append("")
        lines[-1] += f"{item}, "
    lines[-1] += f"and {items[-1]}"
    return "\n".join(line.strip() for line in lines)


def _group(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    about = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and "@package" not in line)
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    sign = "+" if path.parent.name == "experiment" else ""
    return f"### `{sign}{path.parent.name}={path.stem}`\n\n{textwrap.fill(about, 118)}\n\n```yaml\n{body}\n```\n"


def main() -> int:
    """Writes the page, or checks it; returns the exit code."""
    text = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is out of date: run python .ci/write_configuration_page.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
