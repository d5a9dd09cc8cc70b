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
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_train.config.program import program_of
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.distributed.master import is_under_torchrun
from slurm_train.distributed.meeting import (
    Channel,
    Meeting,
    MeetingPoint,
    PortSearch,
    Target,
    answer_timeout_s,
    listen,
)
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import allow_files, require_files
from slurm_train.errors import PreflightError
from slurm_train.formatting import columns, ranges
from slurm_train.rundir.attempts import opened_world_size
from slurm_train.rundir.events import Finding, errors_of, findings_of, write_preflight
from slurm_train.rundir.files import listed, read_json, to_records, write_atomic
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.removal import remove_tree
from slurm_train.slurm.allocation import Allocation
from slurm_train.tools.doctor import gather
from slurm_train.tools.doctor.facts import (
    GpuSpeeds,
    JobFacts,
    NodeFacts,
    ProbeFacts,
    RankFacts,
    SpeedFacts,
    Trouble,
    warning,
)
from slurm_train.tools.doctor.gpu_speed import read_speeds
from slurm_train.tools.doctor.node_rules import (
    find_faults,
    find_mismatched_ranks,
    interface_choices,
    slow_nodes,
)
from slurm_train.tools.doctor.probes import Peer, ProbeServer, describe_error, measure, peers_of, probe

# Measured one after the other, since few nodes may share a machine or a switch.
_FEW_NODES = 8
_ROUNDS = 3
_REPORT_S = 10.0
_LOOK_EVERY_S = 0.5
_LOOKS_PER_S = 2000
_TROUBLE_AFTER_S = 2.0
_CONNECT_S = 1.0
_BELIEVED_TRIES = 2
_GRACE_S = 2.0
_MOST_TRIED = 4
_TROUBLE = "trouble"
# Slow starts are common: a node that is waited for is mentioned only after this time.
_WAITED_S = 20.0
_NOT_UNDER_TORCHRUN = (
    "left out, as torchrun's ranks have met before they come to it, and torchrun would start them again after a "
    "finding; `doctor` with cluster.launcher=srun looks at the same nodes"
)

Verdict = dict[str, Any]
"""What rank 0 has decided, as JSON: "findings", and "variables" of the environment by node."""


def _asked_cpus(cluster: ClusterSection, env: Mapping[str, str]) -> int | None:
    """Returns how many CPUs were asked for, for each rank; None where Slurm chose."""
    typed = cluster.cpus_per_gpu
    if typed != "auto":
        return typed
    chosen = env.get("SLURM_CPUS_PER_TASK", "")
    return int(chosen) if chosen.isdigit() else None


def run_preflight(
    run: RunDirectory,
    config: RunConfig,
    place: RankPlace,
    point: MeetingPoint,
    *,
    env: Mapping[str, str],
) -> dict[str, str]:
    """Returns the variables that this rank's collectives need, e.g. {"GLOO_SOCKET_IFNAME": "ib0"}.

    All ranks of a Slurm step call it, before torch is imported. It does nothing under torchrun.

    Args:
        run: the run.
        config: its configuration.
        place: this rank.
        point: where the ranks will meet.
        env: the environment.

    Raises:
        PreflightError: the nodes are not fit to train on; the message says why in one line.
    """
    if is_under_torchrun(env):
        if place.is_first:
            print(f"preflight: {_NOT_UNDER_TORCHRUN}", file=sys.stderr, flush=True)
        return {}
    allocation = Allocation.from_env(env)
    world_size = opened_world_size(run, point.attempt) or place.world_size
    preflight = Preflight(
        run, config, place, point, env, allocation.nodes, allocation.tasks_per_node, world_size=world_size
    )
    return preflight.apply()


@dataclass
class Preflight:
    """The preflight of one rank."""

    run: RunDirectory
    config: RunConfig
    place: RankPlace
    point: MeetingPoint
    """Where the ranks will meet for the training."""
    env: Mapping[str, str]
    nodes: tuple[str, ...]
    """All nodes of the step in rank order, by Slurm's names."""
    ranks_per_node: tuple[int, ...]
    """Of each of them."""
    world_size: int
    """Ranks that the attempt was opened for."""
    report: dict[str, Any] = field(default_factory=dict, init=False)
    """What rank 0 gets of this rank: "rank", and "node" on the first rank of a node, else None."""

    def __post_init__(self) -> None:
        self.point = replace(self.point, purpose="preflight")
        self._began_s = self._came_s = time.monotonic()

    def apply(self) -> dict[str, str]:
        """Returns what the verdict gives this rank's node.

        Raises:
            PreflightError: the verdict has errors.
        """
        try:
            verdict = self._check() or {"findings": [], "variables": {}}
            errors = errors_of(findings_of(verdict))
            variables = dict(verdict["variables"].get(self.place.host, {}))
        except Exception as err:
            print(f"preflight: not finished, the ranks start without it: {type(err).__name__}: {err}", file=sys.stderr)
            return {}
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            is_lasting = all(finding.cause.lasting for finding in errors)
            raise PreflightError(f"{errors[0].short}{more}", hint=errors[0].hint, is_lasting=is_lasting)
        return variables

    def _check(self) -> Verdict | None:
        """Returns the verdict, None where rank 0 was not found or the connection was lost on the way."""
        allow_files(self.place.world_size)
        rank = gather.read_rank(self.place, self.env)
        self.report = {"rank": asdict(rank), "node": None}
        cluster = self.config.slurm
        gpus = 0 if not self.config.uses_cluster or cluster.gpu_flag == "none" else cluster.gpus_per_node
        job = JobFacts(
            names=self.nodes,
            master="" if self.point.master_addr == self.nodes[0] else self.point.master_addr,
            world_size=self.world_size,
            gpus_per_node=gpus if isinstance(gpus, int) else max(gpus),
            cpus_per_gpu=_asked_cpus(cluster, self.env),
            run_s=None if cluster.time_limit_min is None else 60.0 * cluster.time_limit_min,
            must_compile=self.config.train.compile is True,
            needs_port=program_of(self.config).opens_port,
            port=self.point.ports[0],
            ranks=[rank],
        )
        mismatched = find_mismatched_ranks(job)
        if mismatched:
            return self.conclude(job, mismatched)
        if self.place.is_first:
            return self._lead(job)
        if self.place.local_rank > 0:
            return self._follow()
        with self._answering():
            return self._follow()

    # Every rank.

    @property
    def _folder(self) -> Path:
        """Shared by all nodes; the first rank of each has a file there."""
        return self.run.preflight_folder(self.point.attempt)

    @contextlib.contextmanager
    def _answering(self, **more: Any) -> Iterator[None]:
        """Reads what this node is like, writes it into the shared folder, and answers the probes of other nodes."""
        place = self.place
        peer = self.nodes[1] if place.is_first and len(self.nodes) > 1 else self.point.master_addr
        server = ProbeServer(self.point, place.host, address=self._own_address, family=self._family)
        with contextlib.closing(server):
            try:
                facts = gather.read_node(
                    self.run,
                    self.config,
                    place,
                    self.env,
                    num_nodes=len(self.nodes),
                    peer=peer,
                    probe_port=server.port,
                )
                self.report["node"] = asdict(facts)
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

    def write(self, kind: str = "node", **more: Any) -> None:
        """Puts this node's report into the shared folder; where it cannot be written, the others see that."""
        if self.report["node"] is not None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                text = json.dumps({**self.report, **more})
                write_atomic(self._file(self.place.node_rank, kind), text, durable=False)

    def read(self, node_rank: int, kind: str = "node") -> dict[str, Any]:
        """Returns what a node has written into the shared folder, {} where that is not visible."""
        try:
            return read_json(self._file(node_rank, kind)) or {}
        except OSError:
            return {}

    def troubled(self) -> set[int]:
        """Returns the nodes that have written into the shared folder that they do not reach rank 0: one look."""
        names = (path.stem.partition("_") for path in listed(self._folder) if path.suffix == ".json")
        return {int(number) for kind, _, number in names if kind == _TROUBLE and number.isdigit()}

    def _file(self, node_rank: int, kind: str = "node") -> Path:
        return self._folder / f"{kind}_{node_rank}.json"

    def _answer(self, question: str, peers: Sequence[Peer]) -> dict[str, Any]:
        """Returns what this node finds when it does what rank 0 has asked for: "probe", "measure" or "gpus"."""
        if question == "measure":
            return asdict(measure(self.point, self.place.host, peers))
        if question == "gpus":
            return {"node": self.place.host, **read_speeds(timeout_s=self.config.preflight.collective_timeout_s)}
        return asdict(probe(self.point, self.place.host, peers, folder=self._folder, master=self.nodes[0]))

    # All ranks but 0.

    def _follow(self) -> Verdict | None:
        """Reports to rank 0, does what it asks, and returns its verdict; None where the connection was lost."""
        connection = self._find_rank_0()
        if connection is None:
            return None
        longest_s = answer_timeout_s(self.point, self.place.world_size)
        try:
            with contextlib.closing(connection[0]) as channel:
                channel.send_value(self.report, deadline=time.monotonic() + longest_s)
                while True:
                    value = channel.receive_value(deadline=time.monotonic() + longest_s)
                    if "verdict" in value:
                        verdict: Verdict = value["verdict"]
                        return verdict
                    ((question, peers),) = value.items()
                    answer = self._answer(question, [Peer(**peer) for peer in peers])
                    channel.send_value(answer, deadline=time.monotonic() + longest_s)
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def _find_rank_0(self) -> tuple[Channel, Target] | None:
        """Returns a channel to rank 0; while there is none, the first rank of a node writes why into its file."""
        point = self.point
        began_s = time.monotonic()
        ends_s = began_s + point.timeout_s
        written_s = began_s
        # Of a large job not too many ask the file server and the name server in one second.
        look_every_s = max(_LOOK_EVERY_S, self.place.world_size / _LOOKS_PER_S)
        addresses = [] if self.place.spans_nodes else ["127.0.0.1"]
        error = ""
        search = PortSearch(self.place, point)
        with contextlib.closing(search):
            while time.monotonic() < ends_s:
                if not addresses:
                    addresses, error = gather.resolve(point.master_addr)
                bound = int(self.read(0).get("listens", 0))
                # The port that rank 0 has written down; while none is visible, any.
                ports = [bound] if bound else point.ports
                search.set_targets([(address, port) for port in ports for address in addresses])
                connection = search.run(until=min(time.monotonic() + look_every_s, ends_s))
                if connection is not None:
                    return connection
                now_s = time.monotonic()
                if now_s - began_s > _TROUBLE_AFTER_S and now_s - written_s >= look_every_s:
                    if addresses:
                        tries = search.tries
                        error = search.answers.get((addresses[0], ports[0]), "")
                    else:
                        tries = round((now_s - began_s) / look_every_s)
                    self._write_trouble(tries, addresses, bound, error)
                    written_s = now_s
        return None

    def _write_trouble(self, tries: int, addresses: Sequence[str], port: int, error: str) -> None:
        """Writes into the shared folder that this node does not reach rank 0, and which others it reaches."""
        if self.report["node"] is None:
            return
        reached: dict[bool, list[str]] = {True: [], False: []}
        for index, name in enumerate(self.nodes[1:_MOST_TRIED], 1) if addresses and port else ():
            there = self.read(index).get("node", {})
            if name != self.place.host and there.get("probe_port"):
                try:
                    socket.create_connection((there["address"], there["probe_port"]), timeout=_CONNECT_S).close()
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
            answers=self._answers_elsewhere(addresses, port),
        )
        self.write(_TROUBLE, trouble=asdict(trouble))

    def _answers_elsewhere(self, addresses: Sequence[str], port: int) -> dict[str, str]:
        """Returns the interfaces of rank 0's node, with their addresses, where a program listens at its port."""
        others = self.read(0).get("node", {}).get("addresses", {})
        answers = {}
        for interface, address in others.items() if port else ():
            with contextlib.suppress(OSError):
                if address not in addresses:
                    socket.create_connection((address, port), timeout=_CONNECT_S).close()
                    answers[interface] = address
        return answers

    # Rank 0.

    def _lead(self, job: JobFacts) -> Verdict:
        point = self.point
        require_files(self.place)
        listener = listen(point, family=self._family, address=self._own_address)
        job.bound_port = 0 if listener is None else int(listener.getsockname()[1])
        if listener is None:
            return self.conclude(job, find_faults(job))
        with listener, self._answering(listens=job.bound_port):
            meeting = Meeting(listener, point, world_size=self.place.world_size, host=self.place.host)
            with contextlib.ExitStack() as opened:
                opened.callback(meeting.abandon)
                self._collect(meeting, job)
                self._came_s = time.monotonic()
                if not (job.silent or job.troubles or job.mute):
                    self._question(meeting, job)
                job.waited_s = point.timeout_s if job.silent else time.monotonic() - self._came_s
                verdict = self.conclude(job, find_faults(job))
                meeting.close({"verdict": verdict})
        if not any(finding["level"] == "error" for finding in verdict["findings"]):
            with contextlib.suppress(OSError):
                remove_tree(self._folder)
        return verdict

    def _collect(self, meeting: Meeting, job: JobFacts) -> None:
        """Collects every rank's report, or reads the files of nodes that do not connect."""
        absent = AbsentNodes(self, meeting, job)
        deadline = time.monotonic() + self.point.timeout_s
        meeting.gather(deadline=deadline, is_enough=absent.is_enough, look_every_s=_LOOK_EVERY_S)
        missing_ranks = meeting.missing
        meeting.gather_reports(deadline=time.monotonic() + _REPORT_S)
        job.ranks.clear()
        reports = [
            report for _, report in sorted({0: self.report, **meeting.reports}.items()) if isinstance(report, dict)
        ]
        job.ranks += to_records(RankFacts, (report.get("rank") for report in reports))
        job.nodes += to_records(NodeFacts, (report.get("node") for report in reports))
        counted_ranks = {rank.rank for rank in job.ranks} | {*missing_ranks}
        job.mute = self.nodes_of([rank for rank in range(meeting.world_size) if rank not in counted_ranks])
        missing = self.nodes_of(missing_ranks)
        came = {node.node for node in job.nodes}
        job.troubles = [trouble for trouble in absent.believed if trouble.node in missing]
        job.nodes += [node for name in missing if name not in came for node in absent.facts_of(name)]
        if not job.troubles:
            job.silent = missing

    def nodes_of(self, ranks: Iterable[int]) -> list[str]:
        """Returns the nodes of ranks that have not reported, block after block."""
        nodes = [node for node, count in zip(self.nodes, self.ranks_per_node, strict=True) for _ in range(count)]
        # Ranks with another world size in their environment may count further than Slurm does.
        return list(dict.fromkeys(nodes[min(rank, len(nodes) - 1)] for rank in ranks))

    def _question(self, meeting: Meeting, job: JobFacts) -> None:
        """Makes every node probe others, and measure on request."""
        nodes = sorted(job.nodes, key=lambda node: node.node_rank)
        spans_nodes = self.place.spans_nodes
        all_peers = [
            Peer(
                node=node.node,
                address=node.address,
                port=node.probe_port,
                gloo_address=node.gloo_address,
                file=self._file(node.node_rank).name if spans_nodes else "",
            )
            for node in nodes
        ]
        peers = {}
        for position, node in enumerate(nodes):
            peers[node.node] = [all_peers[other] for other in peers_of(position, len(nodes))]
        leaders = {rank.rank: rank.node for rank in job.ranks if rank.local_rank == 0 and rank.node in peers}

        def ask(question: str, names: Mapping[int, str], *, more_s: float = 0.0) -> Iterator[Any]:
            deadline = time.monotonic() + self.config.preflight.budget_s + more_s
            for leader, name in names.items():
                if leader > 0:
                    meeting.send(leader, {question: [asdict(peer) for peer in peers[name]]})
            for leader, name in names.items():
                value = meeting.receive(leader, deadline=deadline) if leader else self._answer(question, peers[name])
                if value is None:
                    job.late.append(name)
                yield value

        if spans_nodes:
            job.probes = to_records(ProbeFacts, ask("probe", leaders))
        groups = [{leader: name} for leader, name in leaders.items()] if len(leaders) <= _FEW_NODES else [leaders]
        best: dict[str, SpeedFacts] = {}
        for _ in range(_ROUNDS if self.config.preflight.bandwidth else 0):
            for speed in to_records(SpeedFacts, (value for group in groups for value in ask("measure", group))):
                best[speed.node] = better(speed, best.get(speed.node, speed))
            job.speeds = list(best.values())
            # A node that was slow once may have been disturbed for a moment; one that is slow each time is slow.
            if not any(slow_nodes(job)):
                break
        with_gpus = {leader: name for leader, name in leaders.items() if job.node(name).gpus}
        if self.config.preflight.bandwidth and with_gpus:
            answers = ask("gpus", with_gpus, more_s=self.config.preflight.collective_timeout_s)
            job.gpu_speeds = to_records(GpuSpeeds, answers)

    def conclude(self, job: JobFacts, findings: Sequence[Finding]) -> Verdict:
        """Prints what was found, writes it down, and returns the verdict.

        Args:
            job: its nodes are recorded as looked at: none before all ranks have reported.
            findings: the worst first.
        """
        table = node_table(job, findings)
        if findings:
            for line in (*table, *(f"{finding.level}: {finding.line}" for finding in findings)):
                print(f"preflight: {line}", file=sys.stderr, flush=True)
        entries = [finding.as_json() for finding in findings]
        record = {
            "findings": entries,
            "table": table,
            "seconds": round(time.monotonic() - self._began_s, 3),
            "waited_s": round(self._came_s - self._began_s, 3),
            "nodes": [node.node for node in job.nodes],
        }
        write_preflight(self.run, self.point.attempt, record)
        return {"findings": entries, "variables": interface_choices(job)}


class AbsentNodes:
    """Watches the shared folder for nodes that have started and cannot connect to rank 0.

    Nothing is believed that was tried before rank 0 listened, or at another port than its own.

    Args:
        preflight: rank 0's.
        meeting: with the others.
        job: rank 0's, with the port where it listens.
    """

    def __init__(self, preflight: Preflight, meeting: Meeting, job: JobFacts) -> None:
        self._preflight = preflight
        self._meeting = meeting
        self._job = job
        self._began_s = self._looked_s = time.monotonic()
        self._first_tries: dict[str, int] = {}
        self._believed_since_s: float | None = None
        self._is_mentioned = False
        self._numbers = {name: number for number, name in enumerate(preflight.nodes)}
        self.believed: list[Trouble] = []

    def is_enough(self) -> bool:
        """Returns whether the ranks that are missing will not come."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return False
        missing = self._preflight.nodes_of(self._meeting.missing)
        # A node that is merely slow has no such file, so waiting for thousands costs one listing.
        troubled = self._preflight.troubled()
        names = (name for name in missing if self._numbers[name] in troubled)
        self.believed = [trouble for name in names for trouble in self._read(name)]
        # A slow file system must not take all the time from those who call.
        self._looked_s = time.monotonic()
        if now_s - self._began_s > _WAITED_S and not self._is_mentioned:
            self._is_mentioned = True
            hint = "look at their logs and at the node: a slow file system, or a step that was not started there"
            seen = f"not all of its ranks have come within {_WAITED_S:.0f} s; they are waited for"
            finding = warning("NODE_MISSING", ", ".join(missing), seen, hint=hint)
            self._preflight.conclude(self._job, [finding])
        if not self.believed:
            return False
        self._believed_since_s = self._believed_since_s or now_s
        # What is wrong with one node is often wrong with others; they get a moment to report it.
        return {trouble.node for trouble in self.believed} >= set(missing) or now_s - self._believed_since_s > _GRACE_S

    def facts_of(self, name: str) -> list[NodeFacts]:
        """Returns what a node that has not connected has written about itself, if it has."""
        return to_records(NodeFacts, [self._preflight.read(self._numbers[name]).get("node")])

    def _read(self, name: str) -> Iterator[Trouble]:
        value = self._preflight.read(self._numbers[name], _TROUBLE)
        for trouble in to_records(Trouble, [value.get("trouble")]):
            first = self._first_tries.setdefault(name, trouble.tries)
            if trouble.port in (0, self._job.bound_port) and trouble.tries >= first + _BELIEVED_TRIES:
                yield trouble


def better(new: SpeedFacts, old: SpeedFacts) -> SpeedFacts:
    """Returns the best of two measurements of a node."""
    rates = [report.mb_per_s for report in (new, old) if report.mb_per_s is not None]
    latencies = [report.latency_us for report in (new, old) if report.latency_us is not None]
    return SpeedFacts(
        node=new.node,
        work_ms=min(new.work_ms, old.work_ms),
        mb_per_s=max(rates, default=None),
        latency_us=min(latencies, default=None),
    )


def node_table(job: JobFacts, findings: Iterable[Finding]) -> list[str]:
    """Returns the nodes as the lines of a table, the header first; columns without values are left out."""
    ranks_by_node = job.ranks_by_node
    rows = []
    offsets = {probe.node: probe.clock_offset_s for probe in job.probes}
    speeds = {speed.node: speed for speed in job.speeds}
    for node in sorted(job.nodes, key=lambda node: node.node_rank):
        ranks = ranks_by_node.get(node.node, [])
        gpus = [rank.visible_gpus for rank in ranks if rank.visible_gpus is not None]
        free = [gpu.total_mb - gpu.used_mb for gpu in node.gpus or ()]
        room = [disk.free_mb for disk in node.disks if disk.role == "run directory" and disk.free_mb is not None]
        versions = [f"{name} {node.versions[name]}" for name in ("torch", "driver") if name in node.versions]
        offset_s = offsets.get(node.node) if node.node_rank else 0.0
        speed = speeds.get(node.node, SpeedFacts(node=node.node, work_ms=0.0))
        codes = dict.fromkeys(finding.code for finding in findings if node.node in finding.node.split(", "))
        cells = {
            "NODE": node.node,
            "RANKS": ranges(rank.rank for rank in ranks),
            "GPUS": str(max(gpus)) if gpus else "",
            "GPU FREE": f"{min(free) / 1024:.0f} GiB" if free else "",
            "CPUS": f"{len({cpu for rank in ranks for cpu in rank.cpus})} of {node.num_cpus}",
            "WAY TO IT": f"{node.interface} {node.address}".strip(),
            "CLOCK": "" if offset_s is None else f"{offset_s:+.3f} s",
            "RUN DIR FREE": f"{room[0] / 1024:,.0f} GiB" if room else "",
            "VERSIONS": ", ".join(versions),
            "WORK": f"{speed.work_ms:.0f} ms" if speed.work_ms else "",
            "LINK": f"{speed.mb_per_s:,.0f} MB/s" if speed.mb_per_s else "",
            "LATENCY": f"{speed.latency_us:,.0f} us" if speed.latency_us else "",
            "FOUND": ", ".join(codes) or "nothing",
        }
        rows.append({name: cell or "-" for name, cell in cells.items()})
    if not rows:
        return []
    shown = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    lines = [shown]
    for row in rows:
        lines.append([row[name] for name in shown])
    return columns(lines).splitlines()
