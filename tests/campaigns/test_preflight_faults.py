"""The faults of the campaign `preflight` are those that have a code, no more and no less."""

from __future__ import annotations

from slurm_train.tools.doctor.node_rules import OTHER_CODES, rules
from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.preflight_faults import FAULTS


def test_every_code_of_a_run_has_a_fault_that_causes_it() -> None:
    assert {fault.code for fault in FAULTS} == {*rules.codes, *OTHER_CODES}


def test_the_campaign_causes_all_of_them() -> None:
    assert CAMPAIGNS["preflight"].trials == len(FAULTS)
