"""From everything that the ranks have reported to what is wrong, worst first: a pure function."""

from __future__ import annotations

from slurm_train.tools.doctor.evidence import Asked, Evidence
from slurm_train.tools.doctor.finding import Finding, merge
from slurm_train.tools.doctor.rules_files import file_findings
from slurm_train.tools.doctor.rules_hardware import gpu_findings, speed_findings
from slurm_train.tools.doctor.rules_network import network_findings
from slurm_train.tools.doctor.rules_ranks import rank_findings


def diagnose(evidence: Evidence, asked: Asked) -> tuple[Finding, ...]:
    """Returns one finding per problem; empty where nothing is wrong.

    Args:
        evidence: what the ranks have reported, as far as they came.
        asked: what the job should be like.
    """
    found = [
        *rank_findings(evidence, asked),
        *network_findings(evidence, asked),
        *file_findings(evidence),
        *gpu_findings(evidence),
        *speed_findings(evidence),
    ]
    return merge(found, nodes=asked.nodes)
