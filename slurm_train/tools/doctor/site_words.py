"""What happens to a run at a site, in plain sentences: when it is preempted, how it comes back, what can be lost."""

from __future__ import annotations

from slurm_train.slurm.policy import Preemption
from slurm_train.slurm.site import preempting_qos
from slurm_train.tools.doctor.majority import listed
from slurm_train.tools.doctor.site import SiteView, duration_text, requeue_delay_s, usual_preemption


def site_table(view: SiteView) -> list[tuple[str, str]]:
    """Returns the rows of a table about a site: name and value."""
    settings, usual = view.settings, view.usual
    nodes = [f"{part.name} {part.num_usable_nodes} of {part.num_nodes}" for part in view.facts.partitions]
    return [
        ("Slurm", f"{settings.get('SLURM_VERSION', 'not told')}, cluster {settings.get('ClusterName', 'not told')}"),
        ("a job goes to", "not told" if usual is None else f"partition {usual.name}, QOS {view.qos or 'none'}"),
        ("working nodes", listed(nodes, most=8) or "none"),
        ("preemption", f"{settings.get('PreemptType', 'not told')}, mode {settings.get('PreemptMode', 'not told')}"),
        ("KillWait", settings.get("KillWait", "not told")),
        ("JobRequeue", settings.get("JobRequeue", "not told")),
        ("JobFileAppend", settings.get("JobFileAppend", "not told")),
        ("MaxArraySize", settings.get("MaxArraySize", "not told")),
        ("accounting", settings.get("AccountingStorageType", "not told")),
        ("containers", listed(list(view.runtimes)) or "none on the PATH"),
    ]


def in_words(view: SiteView) -> list[str]:
    """Returns what happens to a run here, a sentence or two each; empty where Slurm says nothing."""
    preemption = usual_preemption(view)
    if preemption is None or view.usual is None:
        return []
    return [_on_preemption(view, preemption), _comes_back(view, preemption), _can_be_lost(preemption)]


def _on_preemption(view: SiteView, preemption: Preemption) -> str:
    assert view.usual is not None
    where = f"A run of partition {view.usual.name}" + (f" and QOS {view.qos}" if view.qos else "")
    if preemption.outcome == "never":
        return f"{where} is not preempted: nobody's job may take its nodes."
    by = preempting_qos(view.facts, view.qos) if preemption.by == "qos" else []
    who = f"jobs of QOS {listed(by)}" if by else "jobs of partitions that come before it"
    if preemption.outcome == "suspended":
        return f"{where} can be stopped by {who}, and goes on in the same attempt when they have ended."
    kill = "" if preemption.kill_wait_s is None else f", and KILL {preemption.kill_wait_s:g} s later"
    grace = f"TERM, TERM again after {preemption.grace_s:g} s{kill}" if preemption.grace_s else f"TERM{kill}"
    return f"{where} can be preempted by {who}. Its ranks get {grace}; they save at the next step boundary."


def _comes_back(view: SiteView, preemption: Preemption) -> str:
    delay = f"it keeps its id and may start again after {requeue_delay_s(view.settings):g} s"
    if preemption.outcome == "cancelled":
        return (
            "Slurm cancels what it preempts here, so the supervisor calls `scontrol requeue incomplete` within the "
            f"grace; then {delay}. Where Slurm refuses, it submits the script again, to start when this job has ended."
        )
    return f"The supervisor of the run calls `scontrol requeue incomplete`, before a time limit as well: {delay}."


def _can_be_lost(preemption: Preemption) -> str:
    since = "the steps since the newest checkpoint (checkpoint.every_steps says how many, auto chooses)"
    at_limit = "Nothing at a time limit: the ranks are asked to save before it."
    if preemption.outcome in ("never", "suspended"):
        return f"Nothing is lost by preemption. {at_limit} With a lost node go {since}."
    left_s = preemption.grace_s + (preemption.kill_wait_s or 0.0)
    if not preemption.grace_s:
        return (
            f"A preemption leaves {left_s:g} s from TERM to KILL: where a step and a save take longer, it costs "
            f"{since}. {at_limit} A lost node costs as much."
        )
    return (
        f"Nothing by preemption where the step under way, one more and a save take less than "
        f"{duration_text(left_s)}; else {since}. {at_limit} A lost node costs as much."
    )
