from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_train.config.site_schema import SiteFile
from slurm_train.slurm.refusals import Refusal, TestVerdict
from slurm_train.tools.site import build_profile, trial_script, try_site
from tests.tools.site.sites import facts_of

YES = TestVerdict(is_accepted=True)


def no(refusal: Refusal = Refusal.RESOURCES) -> TestVerdict:
    return TestVerdict(is_accepted=False, refusal=refusal, message="Requested node configuration is not available")


def tried(site: str, takes: Callable[[str], bool], refusal: Refusal = Refusal.RESOURCES) -> tuple[SiteFile, list[str]]:
    """Returns a recorded site after a trial on a Slurm that takes what `takes` says, and what it complains of."""
    facts = facts_of(site)
    partitions = {one.name: one for one in facts.partitions}
    return try_site(build_profile(facts, {}), partitions, lambda text: YES if takes(text) else no(refusal))


def test_the_script_asks_for_a_whole_node_as_a_run_would() -> None:
    site = build_profile(facts_of("typed"), {})
    assert trial_script(site, "h100") == (
        "#!/bin/sh\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
        "#SBATCH --cpus-per-task=24\n#SBATCH --mem=1124G\n#SBATCH --partition=h100\n#SBATCH --account=ml\n"
        "#SBATCH --qos=normal\n#SBATCH --time=1440\n#SBATCH --requeue\ntrue\n"
    )


def test_the_script_asks_for_as_many_nodes_as_a_job_must_have() -> None:
    facts = facts_of("typed")
    partitions = {one.name: replace(one, min_nodes=2 if one.name == "h100" else 1) for one in facts.partitions}
    asked: list[str] = []

    def ask(script: str) -> TestVerdict:
        asked.append(script)
        return YES

    try_site(build_profile(facts, {}), partitions, ask)
    nodes = {"h100" if "--partition=h100" in script else "other": "--nodes=2" in script for script in asked}
    assert nodes == {"h100": True, "other": False}


def test_what_slurm_takes_at_once_stays_as_it_is() -> None:
    assert tried("typed", lambda _: True) == (build_profile(facts_of("typed"), {}), [])


@pytest.mark.parametrize(("taken", "flag"), [("--gres=gpu:8", "gres"), ("--gpus-per-task=1", "gpus-per-task")])
def test_the_spelling_of_gpus_is_found_by_trying(taken: str, flag: str) -> None:
    site, problems = tried("devcluster", lambda script: taken in script)
    assert (site.cluster["gpu_flag"], problems) == (flag, [])


def test_requeue_is_left_out_where_it_is_refused() -> None:
    site, problems = tried("devcluster", lambda script: "--requeue" not in script, Refusal.REQUEUE)
    assert site.refuses_requeue and problems == []


def test_a_type_that_must_be_named_is_named() -> None:
    site, problems = tried("typed", lambda script: "gpu:a100:8" in script or "gpu:h100:4" in script)
    assert problems == [] and site.cluster["gpu_flag"] == "gres"
    kinds = {name: one.cluster.get("gpu_type") for name, one in site.partitions.items()}
    assert kinds == {"a100": "a100", "h100": "h100", "scavenge": "a100"}


def memory_of(script: str) -> int:
    return int(script.partition("--mem=")[2].partition("G")[0] or 0)


def test_memory_that_the_system_keeps_is_left_to_it() -> None:
    site, problems = tried("no_accounting", lambda script: memory_of(script) <= 350)
    assert problems == [] and site.partitions["batch"].cluster["memory_gb_per_gpu"] == int(93 * 0.9)


def test_what_slurm_never_takes_is_left_out() -> None:
    site, problems = tried("no_accounting", lambda script: "--mem" not in script and "--cpus" not in script)
    assert problems == [] and site.partitions["batch"].cluster == {"time_limit_min": 1440}


def test_a_partition_that_takes_nothing_keeps_its_values_and_is_told() -> None:
    site, problems = tried("typed", lambda script: "--partition=h100" not in script)
    assert site == build_profile(facts_of("typed"), {})
    (problem,) = problems
    assert problem.startswith("partition h100: Slurm would not take a run there: Requested node")


def test_a_refusal_that_no_spelling_mends_is_not_asked_again() -> None:
    asked: list[str] = []

    def takes(script: str) -> bool:
        asked.append(script)
        return False

    _, problems = tried("devcluster", takes, Refusal.ACCOUNT)
    assert len(asked) == 1 and len(problems) == 1
