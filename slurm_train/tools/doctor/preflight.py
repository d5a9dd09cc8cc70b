"""The look at nodes and network before the ranks of a job train: who is there, who reaches whom, who is not fit.

Runs on every rank before torch is imported, so that a fault is named within seconds. Rank 0 decides, everyone hears.
What is wrong inside the preflight itself is told and stops nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.meeting import Meeting
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import allow_files
from slurm_train.errors import PreflightError
from slurm_train.rundir.events import write_preflight
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.doctor import gather
from slurm_train.tools.doctor.diagnose import diagnose
from slurm_train.tools.doctor.evidence import Asked, Evidence, PortFacts
from slurm_train.tools.doctor.exchange import Heard, ask_nodes, follow, hear_all, open_port, take_answers
from slurm_train.tools.doctor.facts import NodeFacts
from slurm_train.tools.doctor.finding import Finding, errors_in, read_finding
from slurm_train.tools.doctor.interfaces import resolve
from slurm_train.tools.doctor.participant import Participant, file_name
from slurm_train.tools.doctor.probe_server import ProbeServer
from slurm_train.tools.doctor.probes import Peer, peers_of
from slurm_train.tools.doctor.rules_hardware import best_speeds, speed_findings
from slurm_train.tools.doctor.rules_interfaces import interface_choices
from slurm_train.tools.doctor.rules_ranks import mismatches
from slurm_train.tools.doctor.table import node_table

# Found again whatever the nodes are, unless one node alone is to blame.
_LASTING = frozenset(
    {"WRONG_INTERFACE", "RANK_MISMATCH", "GPU_COUNT", "DATA_MISSING", "LIMITS", "FS_READONLY", "DISK_FULL"}
)
# Measured one after the other, since few nodes may share a machine or a switch.
_FEW_NODES = 8
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightStart:
    """What one rank is told."""

    run: RunDirectory
    config: RunConfig
    place: RankPlace
    point: MeetingPoint
    """Where the ranks will meet for the training."""
    attempt: int
    nodes: tuple[str, ...]
    """All nodes of the step in rank order, by Slurm's names."""
    ranks_per_node: tuple[int, ...]
    """Of each of them."""
    world_size: int
    """Ranks that the run was planned for."""
    env: Mapping[str, str]

    @property
    def asked(self) -> Asked:
        """What the job should be like."""
        cluster = self.config.cluster
        gpus = 0 if cluster is None or cluster.gpu_flag == "none" else cluster.gpus_per_node
        return Asked(
            nodes=self.nodes,
            world_size=self.world_size,
            gpus_per_node=gpus if isinstance(gpus, int) else max(gpus),
            cpus_per_gpu=None if cluster is None else cluster.cpus_per_gpu,
            needs_port=self.config.script is not None,
            local_ranks=self.place.local_world_size,
        )


def run_preflight(start: PreflightStart) -> dict[str, str]:
    """Returns the variables that this rank should have for its collectives. All ranks call it.

    Raises:
        PreflightError: the nodes are not fit to train on; the message says why in one line.
    """
    try:
        verdict = _Preflight(start).run()
    except PreflightError:
        raise
    except Exception as err:
        print(f"preflight: not finished, the ranks start without it: {type(err).__name__}: {err}", file=sys.stderr)
        return {}
    if verdict is None:
        return {}
    _raise_errors(verdict.findings)
    return dict(verdict.variables.get(start.place.host, {}))


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What rank 0 has decided."""

    findings: tuple[Finding, ...]
    variables: Mapping[str, Mapping[str, str]]
    """By node."""


def _raise_errors(findings: Sequence[Finding]) -> None:
    errors = errors_in(findings)
    if not errors:
        return
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    lasting = all(finding.code in _LASTING and not finding.blames_node for finding in errors)
    raise PreflightError(f"{errors[0].short}{more}", hint=errors[0].hint, is_lasting=lasting)


class _Preflight:
    """One rank's way through it."""

    def __init__(self, start: PreflightStart) -> None:
        self.start, self.asked = start, start.asked
        self.point = replace(start.point, purpose="preflight")
        self.began_s = self.came_s = time.monotonic()
        allow_files(start.place.world_size)
        self.report = gather.read_rank(start.place, start.env)

    def run(self) -> _Verdict | None:
        found = tuple(mismatches([self.report], self.asked))
        if found:
            self.keep(found, Evidence())
            return _Verdict(found, {})
        if self.start.place.is_first:
            return self.lead()
        if self.start.place.local_rank > 0:
            return _read_verdict(follow(self.participant(None)))
        server = self.open_server()
        try:
            participant = self.participant(server)
            participant.write({})
            return _read_verdict(follow(participant))
        finally:
            server.close()

    def lead(self) -> _Verdict:
        listener, port = open_port(self.point, address=self.own_address, family=self.family())
        if listener is None:
            evidence = Evidence(port=port)
            return self.decide(evidence)
        with contextlib.ExitStack() as opened:
            opened.enter_context(listener)
            server = self.open_server()
            opened.callback(server.close)
            participant = self.participant(server)
            participant.write({"listens": port.bound})
            heard = Heard(ranks=[self.report], nodes=[participant.facts] if participant.facts else [], port=port)
            place = self.start.place
            meeting = Meeting(listener, self.point, world_size=place.world_size, host=place.host)
            opened.callback(meeting.abandon)
            hear_all(participant, meeting, heard, tell=lambda found: self.keep((found,), Evidence()))
            verdict = self.judge(participant, meeting, heard)
        if not errors_in(verdict.findings):
            shutil.rmtree(participant.folder, ignore_errors=True)
        return verdict

    def judge(self, participant: Participant, meeting: Meeting, heard: Heard) -> _Verdict:
        """Has the nodes look around, decides, and tells everybody."""
        self.came_s = time.monotonic()
        if not heard.silent and not heard.troubles and not heard.mute:
            _question(participant, meeting, heard, measures=self.start.config.preflight.bandwidth)
        waited_s = self.point.timeout_s if heard.silent else time.monotonic() - self.came_s
        verdict = self.decide(_evidence(heard, waited_s))
        shown = [finding.as_json() for finding in verdict.findings]
        meeting.close({"verdict": {"findings": shown, "variables": verdict.variables}})
        return verdict

    def decide(self, evidence: Evidence) -> _Verdict:
        findings = diagnose(evidence, self.asked)
        self.keep(findings, evidence)
        return _Verdict(findings, interface_choices(evidence) if self.start.place.spans_nodes else {})

    def keep(self, findings: Sequence[Finding], evidence: Evidence) -> None:
        """Prints what was found and writes it down."""
        seconds = round(time.monotonic() - self.began_s, 3)
        table = node_table(evidence, findings) if evidence.nodes else []
        for line in (*table, *(f"{finding.level}: {finding.line}" for finding in findings)) if findings else ():
            print(f"preflight: {line}", file=sys.stderr, flush=True)
        waited_s = round(self.came_s - self.began_s, 3)
        found = [one.as_json() for one in findings]
        record = {"findings": found, "table": table, "seconds": seconds, "waited_s": waited_s}
        # Nobody is found well by a word that is said while ranks are waited for.
        write_preflight(self.start.run, self.start.attempt, {**record, "nodes": [node.node for node in evidence.nodes]})

    @property
    def own_address(self) -> str:
        """Where to listen: on one node nobody outside needs to call."""
        return "" if self.start.place.spans_nodes else "127.0.0.1"

    def family(self) -> socket.AddressFamily:
        addresses = resolve(self.point.master_addr)[0] if self.start.place.spans_nodes else []
        return socket.AF_INET6 if addresses and ":" in addresses[0] else socket.AF_INET

    def open_server(self) -> ProbeServer:
        name = self.start.place.host
        server = ProbeServer(self.point, name, address=self.own_address, family=self.family())
        server.start()
        return server

    def participant(self, server: ProbeServer | None) -> Participant:
        start = self.start
        return Participant(
            place=start.place,
            point=self.point,
            node=self.report.node,
            nodes=start.nodes,
            ranks_per_node=start.ranks_per_node,
            folder=start.run.preflight_folder(start.attempt),
            report=self.report,
            facts=None if server is None else self.facts(server),
            budget_s=start.config.preflight.budget_s,
        )

    def facts(self, server: ProbeServer) -> NodeFacts | None:
        """Returns what this node is like; None where that cannot be found out, and then the others go on without."""
        start, master = self.start, self.start.point.master_addr
        peer = start.nodes[1] if start.place.is_first and len(start.nodes) > 1 else master
        try:
            network = gather.read_network(start.place, start.env, master=master, peer=peer, probe_port=server.port)
            return gather.read_node(start.run, start.config, start.place, start.env, network=network)
        except Exception as err:  # nobody knows what a node has in store; a rank that left here would be waited for
            said = f"{type(err).__name__}: {err}"
            print(f"preflight: what {self.report.node} is like is not known: {said}", file=sys.stderr, flush=True)
            return None


def _read_verdict(value: Mapping[str, object] | None) -> _Verdict | None:
    if value is None:
        return None
    findings, variables = value["findings"], value["variables"]
    assert isinstance(findings, list) and isinstance(variables, dict)
    return _Verdict(tuple(read_finding(one) for one in findings), variables)


def _question(participant: Participant, meeting: Meeting, heard: Heard, *, measures: bool) -> None:
    """Has every node look at others, and measure on request."""
    known = {node.node for node in heard.nodes}
    leaders = [rank.rank for rank in heard.ranks if rank.local_rank == 0 and rank.node in known]
    peers = _peers(heard, spans_nodes=participant.place.spans_nodes)
    if participant.place.spans_nodes:
        take_answers(heard, "probe", ask_nodes(participant, meeting, heard, "probe", leaders, peers))
    groups = [[leader] for leader in leaders] if len(leaders) <= _FEW_NODES else [leaders]
    for _ in range(_ROUNDS if measures else 0):
        for group in groups:
            take_answers(heard, "measure", ask_nodes(participant, meeting, heard, "measure", group, peers))
        heard.speeds = best_speeds(heard.speeds)
        # Who was slow once may have been disturbed for a moment; who is slow each time is slow.
        if not any(speed_findings(Evidence(nodes=heard.nodes, speeds=heard.speeds))):
            break


def _peers(heard: Heard, *, spans_nodes: bool) -> dict[str, list[Peer]]:
    nodes = sorted(heard.nodes, key=lambda node: node.node_rank)
    all_peers = [
        Peer(
            node=node.node,
            address=node.network.address,
            port=node.network.probe_port,
            gloo_address=node.network.gloo_address,
            file=file_name(node.node_rank) if spans_nodes else "",
        )
        for node in nodes
    ]
    return {node.node: [all_peers[other] for other in peers_of(index, len(nodes))] for index, node in enumerate(nodes)}


def _evidence(heard: Heard, waited_s: float) -> Evidence:
    port = heard.port if heard.port is not None else PortFacts(asked=0, bound=0)
    return Evidence(
        ranks=heard.ranks,
        nodes=heard.nodes,
        probes=heard.probes,
        speeds=heard.speeds,
        troubles=heard.troubles,
        silent=heard.silent,
        mute=heard.mute,
        late=heard.late,
        port=port,
        waited_s=waited_s,
    )
