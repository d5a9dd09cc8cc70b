"""Writes docs/configuration.md and the files of conf/ that list every key, from the schema and its docstrings.

    python .ci/write_configuration_page.py            # writes them
    python .ci/write_configuration_page.py --check    # says whether they are up to date

`slurm_train/config/schema.py` is the one place of meanings, types and defaults. The files of conf/ that are written
here are what a person reads, copies and shadows under Hydra; the others are written by hand, with what differs.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slurm_train.config.frozen import NOT_IDENTITY
from slurm_train.config.schema import (
    ClusterSection,
    ContainerSection,
    OptimSection,
    RunConfig,
    defaults_of,
    flat,
)

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "configuration.md"
CONF = REPOSITORY / "conf"
SCHEMA = REPOSITORY / "slurm_train" / "config" / "schema.py"

WIDTH = 120
BRACKETS = ("()", "[]", "{}")
CHOICES = {"model": "gpt", "data": "stdlib", "optim": "adamw"}
"""The files that conf/config.yaml chooses."""

PRIMARY_HEAD = """\
# Every key with the value that a run gets by default. Written by .ci/write_configuration_page.py from the docstrings of
# slurm_train/config/schema.py; docs/configuration.md has all that they say. A file of the same name in --config-dir
# shadows this one.
defaults:
  - _self_
  - optim: adamw
  - model: gpt
  - data: stdlib
"""
PRIMARY_TAIL = """\
# Configurations are frozen into the run directory; Hydra's own working directories are not needed.
hydra:
  output_subdir: null
  run:
    dir: .
"""
CLUSTER_HEAD = """\
# What Slurm is asked for. `+cluster=4x8` is this file with nodes=4 and gpus_per_node=8; any NxG works.
# A cluster/base.yaml of your own in --config-dir shadows this one: the place for your site's partition and account.
# Written by .ci/write_configuration_page.py from slurm_train/config/schema.py."""
ADAMW_HEAD = """\
# AdamW. Matrices decay, vectors (norms, biases) do not. A model's file may name its own rate.
# Written by .ci/write_configuration_page.py from slurm_train/config/schema.py."""

HEAD = """\
# Configuration

<!-- Written by .ci/write_configuration_page.py from slurm_train/config/schema.py and conf/; do not edit it by hand. -->

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

Your file replaces the included file completely: keys that it does not have get the defaults of the schema, which the
included one lists. `+cluster=big` selects `my_conf/cluster/big.yaml`, which begins with
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
        if section is None or kind.endswith(" | None"):
            root.append(_key(name, field, meaning, aliases))
        if section is not None:
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
            yield _key(f"{name}.{_name_of(field)}", field, text, aliases)
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


def _key(name: str, field: ast.AnnAssign, meaning: str, aliases: dict[str, str]) -> Key:
    kind = ast.unparse(field.annotation)
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
    "ClusterSection": "section",
    "ContainerSection": "section",
    "dict[str, Count]": "mapping of whole numbers from 1",
    "Count": "whole number from 1",
    "PositiveOrAuto": "whole number from 1, -1",
    "Positive": "number above 0",
    "list[Count]": "list of whole numbers from 1",
    "NonNegativeInt": "whole number from 0",
    "NonNegative": "number from 0",
    "Fraction": "number from 0 to 1",
    "list[NonNegative]": "list of numbers from 0",
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


def render() -> str:
    """Returns the text of docs/configuration.md."""
    defaults = _shipped_defaults()
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


def _shipped_defaults() -> dict[str, Any]:
    """Returns what a key has where nothing sets it, by its dotted name; "???" for what must be given."""
    optional = {"cluster": ClusterSection, "container": ContainerSection}
    defaults = flat(defaults_of(RunConfig)) | {"container.kind": "???", "container.image": "???", **CHOICES}
    for name, section in optional.items():
        defaults |= {f"{name}.{key}": value for key, value in defaults_of(section).items()}
    return defaults


def _row(key: Key, defaults: dict[str, Any]) -> str:
    cells = [f"`{key.name}`", f"`{_value(defaults[key.name])}`", key.kind, key.meaning.rstrip(".")]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _not_identity() -> str:
    sections = {section.name for section in read_sections()}
    return _wrap([f"`{name}`" + (" (all of it)" if name in sections else "") for name in NOT_IDENTITY])


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


# The files of conf/ that list every key


def render_primary() -> str:
    """Returns the text of conf/config.yaml."""
    lines = [PRIMARY_HEAD]
    defaults = defaults_of(RunConfig)
    default_size = defaults["batch"]["default_global_size"]
    defaults["batch"]["default_global_size"] = f"${{oc.select:model._global_size_,{default_size}}}"
    for name, value in defaults.items():
        if name not in CHOICES:
            is_section = isinstance(value, dict)
            lines += [""] if is_section or not lines[-1] else []
            lines += _yaml_lines({name: value}, _meanings())
            lines += [""] if is_section else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, "", PRIMARY_TAIL]))


def render_cluster() -> str:
    """Returns the text of conf/cluster/base.yaml."""
    lines = _yaml_lines(defaults_of(ClusterSection), _meanings(), prefix="cluster.")
    return "\n".join([CLUSTER_HEAD, *lines, ""])


def render_adamw() -> str:
    """Returns the text of conf/optim/adamw.yaml."""
    defaults = defaults_of(OptimSection)
    defaults["lr"] = f"${{oc.select:model._lr_,{_yaml(defaults['lr'])}}}"
    lines = _yaml_lines(defaults, _meanings(), prefix="optim.")
    return "\n".join([ADAMW_HEAD, *lines, ""])


def _meanings() -> dict[str, Key]:
    sections = read_sections()
    headings = {section.name: Key(section.name, "", section.meaning) for section in sections}
    # Of a section that may be missing the root's own key says how it is asked for.
    return headings | {key.name: key for section in sections for key in section.keys}


def _yaml_lines(values: Mapping[str, Any], meanings: Mapping[str, Key], *, prefix: str = "") -> list[str]:
    """Returns a line for each key, those of a section below it, with the beginning of what its docstring says."""
    lines = []
    for name, value in values.items():
        key = meanings.get(f"{prefix}{name}", Key("", "", ""))
        if isinstance(value, dict) and value:
            lines += _with_comment(f"{name}:", key)
            lines += [f"  {line}" for line in _yaml_lines(value, meanings, prefix=f"{prefix}{name}.")]
        else:
            lines += _with_comment(f"{name}: {_yaml(value)}", key)
    return lines


def _yaml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str) and value.startswith("$"):
        return value
    return yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]


def _with_comment(line: str, key: Key) -> list[str]:
    """Returns a line with as much of a key's meaning as it has room for, its choices in front."""
    # "cosine, linear or mapping, null"; the values of a switch need no list.
    named = key.kind.partition(" or ")[0].removesuffix(", null")
    is_choice = re.fullmatch(r"(?!true)[\w-]+(, [\w-]+)+", named) is not None
    choices = f"{named.replace(', ', ' | ')}; " if is_choice else ""
    said = key.meaning.rstrip(".")
    said = f"{said[:1].lower()}{said[1:]}" if choices else said
    meaning = f"{choices}{said}"
    beginning = line if line.endswith(":") else f"{line:<28}"
    room = WIDTH - len(f"  {beginning}  # ")
    ends = [len(choices) + end for end in _ends_of_clauses(said)]
    beside = [end for end in ends if end <= room]
    if beside:
        return [f"{beginning}  # {meaning[: beside[-1]]}"]
    if choices:
        return [f"{beginning}  # {choices.rstrip('; ')}"]
    above = [end for end in ends if end <= WIDTH - len("    # ")]
    return [f"# {meaning[: above[-1]]}", line] if above else [line]


def _ends_of_clauses(text: str) -> list[int]:
    """Returns where a text may be cut: behind its sentences and parts of them; in the first one at a comma as well."""
    found = [match.start() for match in re.finditer(r"; |(?<=[\w\])`]{2})\. |, |$", text)]
    whole = [end for end in found if all(text.count(a, 0, end) == text.count(b, 0, end) for a, b in BRACKETS)]
    first = next((end for end in whole if text.startswith(".", end)), len(text))
    return [end for end in whole if end <= first or not text.startswith(",", end)]


PAGES: Mapping[Path, Callable[[], str]] = {
    # The page quotes the files, so they come first.
    CONF / "config.yaml": render_primary,
    CONF / "cluster" / "base.yaml": render_cluster,
    CONF / "optim" / "adamw.yaml": render_adamw,
    PAGE: render,
}


def main() -> int:
    """Writes the pages, or checks them; returns the exit code."""
    outdated = []
    for path, page in PAGES.items():
        text = page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            outdated.append(path)
            if "--check" not in sys.argv[1:]:
                path.write_text(text, encoding="utf-8")
    if outdated and "--check" in sys.argv[1:]:
        print(f"{outdated} are out of date: run python .ci/write_configuration_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
