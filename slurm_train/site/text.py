"""Writes a site file as YAML that a person reads and edits. Pure; what it writes, `config.site.read_site` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from slurm_train.config.site import SiteFile, SitePartition, SiteQos

_HEAD = """\
# Site "{name}", as `python -m slurm_train init` found it. Yours to edit; chosen by `site={name}`.
# What is typed wins over this file, and this file over the defaults. A run keeps what it took from here.
"""
_REMARKS = {
    "cluster": "# Values of cluster.* for runs in any partition: every key but the size.",
    "partitions": "# The partitions; `cluster` are values for runs that go there, and win over those above.",
    "qos": "# The QOS that you may ask for with cluster.qos.",
    "problems": "# Not known, since Slurm did not say:",
}


def render_site(site: SiteFile, *, name: str, problems: list[str]) -> str:
    """Returns the text of a site file.

    Args:
        site: its content.
        name: how it is chosen.
        problems: what could not be found out, as remarks.
    """
    lines = [*_HEAD.format(name=name).splitlines(), ""]
    lines += [f"slurm_version: {_scalar(site.slurm_version)}"] if site.slurm_version else []
    lines += [f"requeue: {_scalar(site.requeue)}"] if site.requeue else []
    lines += [f"kill_wait_s: {_scalar(site.kill_wait_s)}"] if site.kill_wait_s is not None else []
    lines += _section("cluster", list(_mapping(site.cluster, indent=2)))
    lines += _section("partitions", [line for key, one in site.partitions.items() for line in _partition(key, one)])
    lines += _section("qos", [line for key, one in site.qos.items() for line in _qos(key, one)])
    if problems:
        lines += ["", _REMARKS["problems"], *(f"#   {' '.join(problem.split())}" for problem in problems)]
    return "\n".join(lines) + "\n"


def _section(key: str, lines: list[str]) -> list[str]:
    return ["", _REMARKS[key], f"{key}:", *lines] if lines else []


def _partition(name: str, partition: SitePartition) -> Iterator[str]:
    yield f"  {_scalar(name)}:"
    facts = {
        "num_nodes": partition.num_nodes,
        "gpus_per_node": partition.gpus_per_node,
        "max_time_min": partition.max_time_min,
        "preemption": partition.preemption,
        "grace_s": partition.grace_s,
    }
    yield from _mapping({key: value for key, value in facts.items() if value is not None}, indent=4)
    if partition.cluster:
        yield "    cluster:"
        yield from _mapping(partition.cluster, indent=6)


def _qos(name: str, qos: SiteQos) -> Iterator[str]:
    facts = {
        "preempted_by": qos.preempted_by or None,
        "preemption": qos.preemption,
        "grace_s": qos.grace_s,
        "max_time_min": qos.max_time_min,
    }
    known = {key: value for key, value in facts.items() if value is not None}
    yield f"  {_scalar(name)}:" if known else f"  {_scalar(name)}: {{}}"
    yield from _mapping(known, indent=4)


def _mapping(values: Mapping[str, Any], *, indent: int) -> Iterator[str]:
    for key, value in values.items():
        yield f"{' ' * indent}{_scalar(key)}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """Returns a value in one line of YAML."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return str(yaml.safe_dump(value, allow_unicode=True, width=10**6)).removesuffix("\n").removesuffix("\n...")
