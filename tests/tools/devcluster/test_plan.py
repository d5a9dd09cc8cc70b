"""The plan and the configuration files made of it; `golden/` is what a person reviews."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.plan import ClusterPlan, configuration, load_plan

_GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 8), "--nodes must be from 1 to 64, got 0"),
        ((4, 17), "--gpus must be from 0 to 16, got 17"),
        *(
            ((1, 1, Path(path)), "cannot be named in Slurm's configuration")
            for path in ("relative", "/with space", "/a/../b", "/" + "x" * 71)
        ),
    ],
)
def test_what_could_not_be_built_is_refused(shape, message):
    with pytest.raises(ClusterError, match=message):
        ClusterPlan(*shape)


@pytest.mark.parametrize(
    "text", ["{", '{"nodes": 2}', '{"nodes": 2, "gpus": 1, "colour": 3}', '{"nodes": 0, "gpus": 1}']
)
def test_a_plan_that_is_not_whole_counts_as_none(tmp_path, text):
    assert load_plan(tmp_path) is None
    (tmp_path / "plan.json").write_text(text)
    assert load_plan(tmp_path) is None


def test_configuration_matches_the_golden_files():
    texts = configuration(ClusterPlan(nodes=4, gpus=8), nsswitch="passwd: files systemd\nhosts: files mdns4 dns\n")
    golden = {path.name: path.read_text(encoding="utf-8") for path in _GOLDEN.iterdir()}
    assert {name: texts[name] for name in golden} == golden
    assert texts["nsswitch.conf"] == "passwd: files systemd\nhosts: files\n"


def test_a_slurm_that_does_not_know_a_key_is_not_given_it():
    plan = ClusterPlan(nodes=2, gpus=1)
    assert "cgroup.conf" not in configuration(plan, slurm=(20, 11))
    assert configuration(plan, slurm=(26, 5)) == configuration(plan)
    assert "CgroupPlugin=cgroup/v1\n" in configuration(plan)["cgroup.conf"]
