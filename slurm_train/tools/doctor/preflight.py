"""The check of nodes and network before the ranks of a job train: who is there, who reaches whom, who is not fit.

Runs on every rank before torch is imported, so that a fault is named within seconds. Rank 0 decides for all:

    every rank                          rank 0
    report  ------------------------->  waits for all, and reads the files of nodes that cannot connect
    first rank of a node:
            <-------------------------  which peers to probe
    what it found  ------------------>  applies the rules
            <-------------------------  the verdict, to every rank

Rank 0 waits as long as the meeting of the ranks would; its questions after all have connected have a budget. A rank
that loses its connection goes on without a verdict: the meeting of the ranks has its own error for a rank 0 that died.
A fault of the preflight itself is printed and stops nothing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from slurm_train.config.schema import RunConfig, build_config
from slurm_train.distributed.meeting import (
    Channel,
    Meeting,
    MeetingPoint,
    Search,
    Target,
    answer_timeout_s,
    listen,
)
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import allow_files, require_files
from slurm_train.errors import ConfigError, PreflightError
from slurm_train.formatting import columns
from slurm_train.rundir.events import Finding, read_finding, write_preflight
from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.doctor import gather
from slurm_train.tools.doctor.facts import (
    Asked,
    Evidence,
    NodeFacts,
    PortFacts,
    ProbeFacts,
    RankFacts,
    SpeedFacts,
    Trouble,
)
from slurm_train.tools.doctor.findings import warning
from slurm_train.tools.doctor.node_rules import as_ranges, best_speeds, interface_choices, rules
from slurm_train.tools.doctor.probes import Peer, ProbeServer, describe_error, measure, peers_of, probe

# Found again whatever the nodes are, unless one node alone is to blame.
_LASTING = {"WRONG_INTERFACE", "RANK_MISMATCH", "GPU_COUNT", "DATA_MISSING", "LIMITS", "FS_READONLY", "DISK_FULL"}
# Measured one after the other, since few nodes may share a machine or a switch.
_FEW_NODES = 8
_ROUNDS = 3
_REPORT_S = 10.0
_LOOK_EVERY_S = 0.5
_TROUBLE_AFTER_S = 2.0
_CONNECT_S = 1.0
_BELIEVED_TRIES = 2
_GRACE_S = 2.0
_MOST_TRIED = 4
# Slow starts are common: a node that is waited for is mentioned only after this time.
_WAITED_S = 20.0

Verdict = dict[str, Any]
"""What rank 0 has decided, as JSON: "findings", and "variables" of the environment by node."""


def run_preflight(preflight: Preflight) -> dict[str, str]:
    """Returns the variables that this rank should have for its collectives. All ranks call it.

    Raises:
        PreflightError: the nodes are not fit to train on; the message says why in one line.
    """
    try:
        verdict = preflight.check() or {"findings": [], "variables": {}}
        errors = [one for one in map(read_finding, verdict["findings"]) if one.level == "error"]
        variables = dict(verdict["variables"].get(preflight.place.host, {}))
    except Exception as err:
        print(f"preflight: not finished, the ranks start without it: {type(err).__name__}: {err}", file=sys.stderr)
        return {}
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        lasting = all(finding.code in _LASTING and not finding.blames_node for finding in errors)
        raise PreflightError(f"{errors[0].short}{more}", hint=errors[0].hint, is_lasting=lasting)
    return variables


@dataclass(kw_only=True)
class Preflight:
    """The preflight of one rank."""

    run: RunDirectory
    config: RunConfig
    place: RankPlace
    point: MeetingPoint
    """Where the ranks will meet for the training."""
    nodes: tuple[str, ...]
    """All nodes of the step in rank order, by Slurm's names."""
    ranks_per_node: tuple[int, ...]
    """Of each of them."""
    world_size: int
    """Ranks that the run was planned for."""
    env: Mapping[str, str]
    facts: NodeFacts | None = field(default=None, init=False)
    """Of this node; None on other ranks than its first."""

    def __post_init__(self) -> None:
        self.point = replace(self.point, purpose="preflight")
        self._began_s = self._came_s = time.monotonic()

    @cached_property
    def report(self) -> RankFacts:
        """What this rank knows of itself."""
        return gather.read_rank(self.place, self.env)

    @property
    def folder(self) -> Path:
        """Shared by all nodes; the first rank of each has a file there."""
        return self.run.preflight_folder(self.point.attempt)

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
        )

    def check(self) -> Verdict | None:
        """Returns the verdict, None where rank 0 was not found or the connection was lost on the way."""
        allow_files(self.place.world_size)
        alone = Evidence(asked=self.asked, ranks=[self.report])
        if found := rules.find(alone, only=("RANK_MISMATCH",)):
            return self._conclude(found)
        if self.place.is_first:
            return self._lead()
        if self.place.local_rank > 0:
            return self._follow()
        with self._answering():
            return self._follow()

    # Every rank.

    @contextlib.contextmanager
    def _answering(self, **more: Any) -> Iterator[None]:
        """Reads what this node is like, writes it into the shared folder, and answers the probes of other nodes."""
        place, env = self.place, self.env
        peer = self.nodes[1] if place.is_first and len(self.nodes) > 1 else self.point.master_addr
        server = ProbeServer(self.point, place.host, address=self._own_address, family=self._family)
        with contextlib.closing(server):
            try:
                network = gather.read_network(place, env, peer=peer, probe_port=server.port)
                self.facts = gather.read_node(self.run, self.config, place, env, network=network)
            except Exception as err:  # of a node in an unknown state; a rank that left here would be waited for
                unknown = f"what {place.host} is like is not known: {type(err).__name__}: {err}"
                print(f"preflight: {unknown}", file=sys.stderr, flush=True)
            self.write(**more)
            yield

    @property
    def _own_address(self) -> str:
        # On one node nothing outside needs to connect.
        return "" if self.place.spans_nodes else "127.0.0.1"

    @property
    def _family(self) -> socket.AddressFamily:
        addresses = gather.resolve(self.point.master_addr)[0] if self.place.spans_nodes else []
        return socket.AF_INET6 if addresses and ":" in addresses[0] else socket.AF_INET

    def write(self, **more: Any) -> None:
        """Puts this node's report into the shared folder; where it cannot be written, the others see that."""
        if self.facts is not None:
            value = {"rank": asdict(self.report), "node": asdict(self.facts), **more}
            with contextlib.suppress(OSError):
                self.folder.mkdir(mode=0o700, exist_ok=True)
                write_atomic(self._file(self.place.node_rank), json.dumps(value), durable=False)

    def read(self, node_rank: int) -> dict[str, Any]:
        """Returns what a node has written into the shared folder, {} where that is not visible."""
        try:
            return read_json(self._file(node_rank)) or {}
        except OSError:
            return {}

    def _file(self, node_rank: int) -> Path:
        return self.folder / f"node_{node_rank}.json"

    def _answer(self, question: str, peers: Sequence[Peer]) -> dict[str, Any]:
        """Returns what this node finds when it does what rank 0 has asked for: "probe" or "measure"."""
        if question == "measure":
            return asdict(measure(self.point, self.place.host, peers))
        return asdict(probe(self.point, self.place.host, peers, folder=self.folder, master=self.nodes[0]))

    # All ranks but 0.

    def _follow(self) -> Verdict | None:
        """Reports to rank 0, does what it asks, and returns its verdict; None where the connection was lost."""
        found = self._find_rank_0()
        if found is None:
            return None
        report = {"rank": asdict(self.report), "node": None if self.facts is None else asdict(self.facts)}
        longest_s = answer_timeout_s(self.point, self.place.world_size)
        try:
            with contextlib.closing(found[0]) as channel:
                channel.send_value(report, deadline=time.monotonic() + longest_s)
                while "verdict" not in (value := channel.receive_value(deadline=time.monotonic() + longest_s)):
                    ((question, peers),) = value.items()
                    answer = self._answer(question, [Peer(**peer) for peer in peers])
                    channel.send_value(answer, deadline=time.monotonic() + longest_s)
                verdict: Verdict = value["verdict"]
                return verdict
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def _find_rank_0(self) -> tuple[Channel, Target] | None:
        """Returns a channel to rank 0; while there is none, the first rank of a node writes why into its file."""
        point, began_s = self.point, time.monotonic()
        ends_s, written_s = began_s + point.timeout_s, began_s
        search = Search(self.place, point)
        with contextlib.closing(search):
            while (now_s := time.monotonic()) < ends_s:
                addresses, error = gather.resolve(point.master_addr) if self.place.spans_nodes else (["127.0.0.1"], "")
                bound = int(self.read(0).get("listens", 0))
                # The port that rank 0 has written down; while none is visible, any.
                ports = [bound] if bound else point.ports
                search.set_targets([(address, port) for port in ports for address in addresses])
                found = search.run(until=min(now_s + _LOOK_EVERY_S, ends_s))
                if found is not None:
                    return found
                now_s = time.monotonic()
                if now_s - began_s > _TROUBLE_AFTER_S and now_s - written_s > _LOOK_EVERY_S:
                    if addresses:
                        tries, error = search.tries, search.answers.get((addresses[0], ports[0]), "")
                    else:
                        tries = round((now_s - began_s) / _LOOK_EVERY_S)
                    self._write_trouble(tries, addresses, bound, error)
                    written_s = now_s
        return None

    def _write_trouble(self, tries: int, addresses: Sequence[str], port: int, error: str) -> None:
        """Writes into the shared folder that this node does not reach rank 0, and which others it reaches."""
        if self.facts is None:
            return
        reached: dict[bool, list[str]] = {True: [], False: []}
        for index, name in enumerate(self.nodes[1:_MOST_TRIED], 1) if addresses and port else ():
            network = self.read(index).get("node", {}).get("network", {})
            if name != self.place.host and network.get("probe_port"):
                try:
                    there = network["address"], network["probe_port"]
                    socket.create_connection(there, timeout=_CONNECT_S).close()
                    reached[True].append(name)
                except OSError:
                    reached[False].append(name)
        trouble = Trouble(
            node=self.place.host,
            tries=tries,
            address=addresses[0] if addresses else "",
            port=port,
            error=describe_error(error),
            reached=reached[True],
            unreached=reached[False],
        )
        self.write(trouble=asdict(trouble))

    # Rank 0.

    def _lead(self) -> Verdict:
        asked, point = self.asked, self.point
        require_files(self.place)
        listener = listen(point, family=self._family, address=self._own_address)
        bound = 0 if listener is None else int(listener.getsockname()[1])
        holder = "" if bound in (0, point.ports[0]) else gather.holder_of(point.ports[0])
        port = PortFacts(asked=point.ports[0], bound=bound, holder=holder)
        if listener is None:
            return self._decide(Evidence(asked=asked, port=port))
        with listener, self._answering(listens=bound):
            evidence = Evidence(asked=asked, ranks=[self.report], nodes=[self.facts] if self.facts else [], port=port)
            meeting = Meeting(listener, point, world_size=self.place.world_size, host=self.place.host)
            with contextlib.ExitStack() as opened:
                opened.callback(meeting.abandon)
                self._collect(meeting, evidence)
                self._came_s = time.monotonic()
                if not (evidence.silent or evidence.troubles or evidence.mute):
                    self._question(meeting, evidence)
                evidence.waited_s = point.timeout_s if evidence.silent else time.monotonic() - self._came_s
                verdict = self._decide(evidence)
                meeting.close({"verdict": verdict})
        if not any(finding["level"] == "error" for finding in verdict["findings"]):
            shutil.rmtree(self.folder, ignore_errors=True)
        return verdict

    def _collect(self, meeting: Meeting, evidence: Evidence) -> None:
        """Collects every rank's report, or reads the files of nodes that do not connect."""
        assert evidence.port is not None
        absent = AbsentNodes(self, meeting, bound=evidence.port.bound)
        deadline = time.monotonic() + self.point.timeout_s
        meeting.gather(deadline=deadline, is_enough=absent.is_enough, look_every_s=_LOOK_EVERY_S)
        missing_ranks = meeting.missing
        meeting.gather_reports(deadline=time.monotonic() + _REPORT_S)
        for _, report in sorted(meeting.reports.items()):
            with contextlib.suppress(ConfigError, KeyError, TypeError):
                evidence.ranks.append(build_config(RankFacts, report["rank"]))
                if report["node"] is not None:
                    evidence.nodes.append(build_config(NodeFacts, report["node"]))
        known = {rank.rank for rank in evidence.ranks} | {*missing_ranks}
        evidence.mute = self.nodes_of([rank for rank in range(meeting.world_size) if rank not in known])
        missing, came = self.nodes_of(missing_ranks), {node.node for node in evidence.nodes}
        evidence.troubles = [trouble for trouble in absent.believed if trouble.node in missing]
        evidence.nodes += [node for name, node in absent.facts.items() if name in missing and name not in came]
        if not evidence.troubles:
            evidence.silent = missing

    def nodes_of(self, ranks: Iterable[int]) -> list[str]:
        """Returns the nodes of ranks that have not reported, block after block."""
        nodes = [node for node, count in zip(self.nodes, self.ranks_per_node, strict=True) for _ in range(count)]
        # Ranks with another world size in their environment may count further than Slurm does.
        return list(dict.fromkeys(nodes[min(rank, len(nodes) - 1)] for rank in ranks))

    def _question(self, meeting: Meeting, evidence: Evidence) -> None:
        """Makes every node probe others, and measure on request."""
        nodes = sorted(evidence.nodes, key=lambda node: node.node_rank)
        spans_nodes = self.place.spans_nodes
        all_peers = [
            Peer(
                node=node.node,
                address=node.network.address,
                port=node.network.probe_port,
                gloo_address=node.network.gloo_address,
                file=self._file(node.node_rank).name if spans_nodes else "",
            )
            for node in nodes
        ]
        peers = {
            node.node: [all_peers[other] for other in peers_of(index, len(nodes))] for index, node in enumerate(nodes)
        }
        leaders = {rank.rank: rank.node for rank in evidence.ranks if rank.local_rank == 0 and rank.node in peers}

        def ask(question: str, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
            deadline = time.monotonic() + self.config.preflight.budget_s
            for leader, name in names.items():
                if leader > 0:
                    meeting.send(leader, {question: [asdict(peer) for peer in peers[name]]})
            for leader, name in names.items():
                value = meeting.receive(leader, deadline=deadline) if leader else self._answer(question, peers[name])
                if isinstance(value, dict):
                    yield value
                else:
                    evidence.late.append(name)

        if spans_nodes:
            for value in ask("probe", leaders):
                with contextlib.suppress(ConfigError):
                    evidence.probes.append(build_config(ProbeFacts, value))
        groups = [{leader: name} for leader, name in leaders.items()] if len(leaders) <= _FEW_NODES else [leaders]
        for _ in range(_ROUNDS if self.config.preflight.bandwidth else 0):
            for value in (value for group in groups for value in ask("measure", group)):
                with contextlib.suppress(ConfigError):
                    evidence.speeds.append(build_config(SpeedFacts, value))
            evidence.speeds = best_speeds(evidence.speeds)
            # A node that was slow once may have been disturbed for a moment; one that is slow each time is slow.
            if not rules.find(evidence, only=("SLOW_NODE", "SLOW_LINK")):
                break

    def _decide(self, evidence: Evidence) -> Verdict:
        return self._conclude(rules.find(evidence, nodes=self.nodes), evidence)

    def _conclude(self, findings: Sequence[Finding], evidence: Evidence | None = None) -> Verdict:
        """Prints what was found, writes it down, and returns the verdict.

        Args:
            findings: the worst first.
            evidence: what they are based on; None where not all ranks have reported: then no node is recorded as well.
        """
        nodes = [node.node for node in evidence.nodes] if evidence else []
        table = node_table(evidence, findings) if evidence and nodes else []
        if findings:
            for line in (*table, *(f"{finding.level}: {finding.line}" for finding in findings)):
                print(f"preflight: {line}", file=sys.stderr, flush=True)
        now_s, found = time.monotonic(), [finding.as_json() for finding in findings]
        seconds, waited_s = round(now_s - self._began_s, 3), round(self._came_s - self._began_s, 3)
        record = {"findings": found, "table": table, "seconds": seconds, "waited_s": waited_s, "nodes": nodes}
        write_preflight(self.run, self.point.attempt, record)
        return {"findings": found, "variables": interface_choices(evidence) if evidence else {}}

    def mention(self, finding: Finding) -> None:
        """Prints and writes down a finding while ranks are still waited for."""
        self._conclude([finding])


class AbsentNodes:
    """Watches the shared folder for nodes that have started and cannot connect to rank 0.

    Nothing is believed that was tried before rank 0 listened, or at another port than its own.

    Args:
        preflight: rank 0's.
        meeting: with the others.
        bound: rank 0's port.
    """

    def __init__(self, preflight: Preflight, meeting: Meeting, *, bound: int) -> None:
        self._preflight, self._meeting, self._bound = preflight, meeting, bound
        self._began_s = self._looked_s = time.monotonic()
        self._first_tries: dict[str, int] = {}
        self._believed_since_s: float | None = None
        self._is_mentioned = False
        self.believed: list[Trouble] = []
        self.facts: dict[str, NodeFacts] = {}

    def is_enough(self) -> bool:
        """Returns whether the ranks that are missing will not come."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return False
        missing = self._preflight.nodes_of(self._meeting.missing)
        self.believed = [trouble for name in missing for trouble in self._read(name)]
        # A slow file system must not take all the time from those who call.
        self._looked_s = time.monotonic()
        if now_s - self._began_s > _WAITED_S and not self._is_mentioned:
            self._is_mentioned = True
            hint = "look at their logs and at the node: a slow file system, or a step that was not started there"
            seen = f"not all of its ranks have come within {_WAITED_S:.0f} s; they are waited for"
            self._preflight.mention(warning(", ".join(missing), seen, hint=hint, code="NODE_MISSING"))
        if not self.believed:
            return False
        self._believed_since_s = self._believed_since_s or now_s
        # What is wrong with one node is often wrong with others; they get a moment to report it.
        return {trouble.node for trouble in self.believed} >= set(missing) or now_s - self._believed_since_s > _GRACE_S

    def _read(self, name: str) -> Iterator[Trouble]:
        value = self._preflight.read(self._preflight.nodes.index(name))
        with contextlib.suppress(ConfigError, KeyError, TypeError):
            self.facts[name] = build_config(NodeFacts, value["node"])
            trouble = build_config(Trouble, value["trouble"])
            first = self._first_tries.setdefault(name, trouble.tries)
            if trouble.port in (0, self._bound) and trouble.tries >= first + _BELIEVED_TRIES:
                yield trouble


def node_table(evidence: Evidence, findings: Iterable[Finding]) -> list[str]:
    """Returns the nodes as the lines of a table, the header first; columns without values are left out."""
    codes: dict[str, dict[str, None]] = {}
    for finding in findings:
        for name in finding.node.split(", "):
            codes.setdefault(name, {})[finding.code] = None
    ranks_by_node, rows = evidence.ranks_by_node, []
    for node in sorted(evidence.nodes, key=lambda node: node.node_rank):
        ranks = ranks_by_node.get(node.node, [])
        gpus = [rank.visible_gpus for rank in ranks if rank.visible_gpus is not None]
        free = [gpu.total_mb - gpu.used_mb for gpu in node.gpus or ()]
        bound = {cpu for rank in ranks for cpu in rank.cpus}
        offsets = [probe.clock_offset_s for probe in evidence.probes if probe.node == node.node]
        room = [disk.free_mb for disk in node.disks if disk.role == "run directory" and disk.free_mb is not None]
        versions = [f"{name} {node.versions[name]}" for name in ("torch", "driver") if name in node.versions]
        speed = next((speed for speed in evidence.speeds if speed.node == node.node), None)
        cells = {
            "NODE": node.node,
            "RANKS": as_ranges(rank.rank for rank in ranks),
            "GPUS": str(max(gpus)) if gpus else "",
            "GPU FREE": f"{min(free) / 1024:.0f} GiB" if free else "",
            "CPUS": f"{len(bound)} of {node.num_cpus}" if bound else "",
            "WAY TO IT": f"{node.network.interface} {node.network.address}".strip(),
            "CLOCK": "0" if node.node_rank == 0 else "".join(f"{one:+.3f} s" for one in offsets if one is not None),
            "RUN DIR FREE": f"{room[0] / 1024:,.0f} GiB" if room else "",
            "VERSIONS": ", ".join(versions),
            "WORK": f"{speed.work_ms:.0f} ms" if speed else "",
            "LINK": f"{max(speed.mb_per_s.values()):,.0f} MB/s" if speed and speed.mb_per_s else "",
            "LATENCY": f"{min(speed.latency_us.values()):,.0f} us" if speed and speed.latency_us else "",
            "FOUND": ", ".join(codes.get(node.node, ())) or "nothing",
        }
        rows.append({name: cell or "-" for name, cell in cells.items()})
    shown = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    return columns([shown, *([row[name] for name in shown] for row in rows)]).splitlines()
