"""Why a job waits or has ended, in a phrase: Slurm has some two hundred one-word codes for it.

The codes of limits are put together from a few words (QOSMaxGRESPerUser), and so are their phrases. A code that is not
known here is passed on as it is: a new Slurm must not break `status`.
"""

from __future__ import annotations

import re

_PHRASES = {
    "None": "the scheduler has not looked at it yet",
    "Priority": "other jobs come first",
    "Resources": "waits for free nodes",
    "Dependency": "another job must end first",
    "DependencyNeverSatisfied": "the job that it depends on ended otherwise, so it will never start",
    "BeginTime": "its earliest start has not come yet; after a requeue Slurm waits for two minutes",
    "Cleaning": "what is left of its last start is being cleaned up",
    "Prolog": "the nodes are being prepared",
    "JobHeldUser": "held by its user; `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator, or by Slurm after a failed start",
    "JobHoldMaxRequeue": "requeued so often that Slurm holds it; `scontrol release` lets it go",
    "JobArrayTaskLimit": "as many runs of its array are active as may be at once (sweep.max_parallel)",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for",
    "Licenses": "waits for a license",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation is gone",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition starts no jobs now",
    "PartitionNodeLimit": "asks for more or fewer nodes than the partition allows",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "PartitionConfig": "asks for more than the partition has",
    "AccountNotAllowed": "the account may not use the partition",
    "AccountingPolicy": "a limit of the accounting is reached",
    "InvalidAccount": "there is no such account for this user",
    "InvalidQOS": "there is no such QOS for this account",
    "QOSNotAllowed": "the QOS may not be used here",
    "QOSUsageThreshold": "the usage is above the threshold of the QOS",
    "QOSJobLimit": "the QOS's limit on running jobs is reached",
    "QOSResourceLimit": "the QOS's limit on resources is reached",
    "QOSTimeLimit": "asks for more time than the QOS allows",
    "AssociationJobLimit": "your account's limit on running jobs is reached",
    "AssociationResourceLimit": "your account's limit on resources is reached",
    "AssociationTimeLimit": "your account's limit on time is reached",
    "MaxMemPerLimit": "asks for more memory per CPU or node than is allowed",
    "DeadLine": "cannot end before its deadline",
    "FedJobLock": "waits for another cluster of the federation",
    "InactiveLimit": "was idle for longer than the site allows",
    "NonZeroExitCode": "the batch script ended with an error",
    "TimeLimit": "ran into its time limit",
    "OutOfMemory": "ran out of memory",
    "JobLaunchFailure": "could not be started on its nodes",
    "SystemFailure": "Slurm or a node failed",
    "launch failed requeued held": "could not be started on its nodes, so it is held; `scontrol release` tries again",
}
_BEGINNINGS = {
    "Nodes required for job are": "nodes that it could have are down, drained or kept for other partitions",
    "RaisedSignal": "was ended by a signal",
    "BurstBuffer": "waits for the burst buffer",
    "FrontEnd": "waits for a front-end node",
}
# These wait for nodes; all others wait for something else and delay nobody.
_WAITS_FOR_NODES = ("", "None", "Priority", "Resources", "ReqNodeNotAvail", "NodeDown", "Nodes required for job are")

_LIMIT = re.compile(
    r"(?P<owner>Assoc|QOS|)(?P<kind>Grp|Max|Min)"
    r"(?P<what>CPU|Cpu|GRES|Node|Memory|Mem|Jobs?|SubmitJobs?|WallDuration|Wall|Billing|BB|Energy|Licenses?|License|Unknown)"
    r"(?P<time>RunMinutes|Minutes|)(?P<scope>PerJob|PerNode|PerUser|PerAccount|)(?:Limit|NotSatisfied|)"
)
_OWNERS = {"Assoc": "your account", "QOS": "the QOS", "": "the account"}
_WHAT = {
    "CPU": "CPU cores",
    "GRES": "GPUs",
    "NODE": "nodes",
    "MEM": "memory",
    "MEMORY": "memory",
    "JOB": "running jobs",
    "SUBMITJOB": "submitted jobs",
    "WALL": "run time",
    "WALLDURATION": "run time",
    "BILLING": "billing units",
    "BB": "burst buffer",
    "ENERGY": "energy",
    "LICENSE": "licenses",
    "UNKNOWN": "a resource",
}
_SCOPES = {"PerUser": " per user", "PerAccount": " per account", "PerNode": " on one node", "PerJob": "", "": ""}


def explain_reason(reason: str) -> str:
    """Returns a reason in a phrase with Slurm's own word after it, e.g. "waits for free nodes (Resources)".

    Args:
        reason: as squeue's %r has it, e.g. "ReqNodeNotAvail, UnavailableNodes:node1"; "" gives "".
    """
    if not reason:
        return ""
    code = _code_of(reason)
    by_beginning = (phrase for beginning, phrase in _BEGINNINGS.items() if code.startswith(beginning))
    phrase = _PHRASES.get(code) or next(by_beginning, "") or _explain_limit(code)
    if not phrase:
        return f"Slurm says {reason}"
    # A reason of several words adds nothing to the phrase.
    return phrase if " " in code else f"{phrase} ({reason})"


def waits_for_nodes(reason: str) -> bool:
    """Returns whether a job that waits for this reason would start if it had nodes."""
    return _code_of(reason) in _WAITS_FOR_NODES or reason.startswith(_WAITS_FOR_NODES[-1])


def _code_of(reason: str) -> str:
    """Returns the code without what Slurm adds to it: "ReqNodeNotAvail, UnavailableNodes:n1" -> "ReqNodeNotAvail"."""
    text = reason.strip().strip("()").replace("_", " ")
    first = text.split(",")[0].strip()
    return text if " " in first else first


def _explain_limit(code: str) -> str:
    match = _LIMIT.fullmatch(code)
    if match is None:
        return ""
    owner, word = _OWNERS[match["owner"]], match["what"].upper()
    what = _WHAT.get(word) or _WHAT[word.removesuffix("S")]
    what = f"minutes of {what}" if match["time"] else what
    if match["kind"] == "Min":
        return f"asks for less than the {what} that {owner} wants"
    if match["scope"] in ("PerJob", "PerNode") or match["what"] == "WallDuration":
        place = _SCOPES["PerNode"] if match["scope"] == "PerNode" else " for one job"
        return f"asks for more {what} than {owner} allows{place}, so it will not start as it is"
    scope = " of all jobs together" if match["kind"] == "Grp" else _SCOPES[match["scope"]]
    return f"{owner}'s limit on {what}{scope} is reached"
