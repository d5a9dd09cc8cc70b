"""Why an attempt ended, as a value; and the one table of what is known of the words of an end.

`KINDS` is the only place where such words are tested. A row says what kind of end it is, whether it is to be expected
again, whether the node of the rank may be at fault, and what to do. A new diagnosis is one row. The ledger has a cause
as fields. The sentence is made last, and nothing is read out of it; `Cause.of_note` reads the notes of ledgers without
fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurm_train.formatting import ranges
from slurm_train.slurm.records import NO_STEP

# The rows of these names decide more than their columns say: which log is read for it, whether a node was lost.
NODE_FAILURE = "node_failure"
NOT_CREATED = "not_created"
WARNED = "warned"
KILLED = "killed"
CRASH = "crash"
CHILD_CRASH = "child_crash"
EXIT = "exit"
LOST_PEER = "lost_peer"
GPU_MEMORY = "gpu_memory"
HANG = "hang"

_NO_MEMORY = r"\bMemoryError|[Cc]an(?:'t|not) allocate memory|bad_alloc"
_RAISE_MEMORY = (
    "out of the node's memory: raise cluster.memory_gb_per_node (0: all of it), or lower data.num_workers or "
    "batch.local_size"
)
_IN_NOTE = re.compile(r"\branks? (?P<rank>\d+)[\d,-]* on (?P<host>[\w.-]+)")
# How a note begins where no rank left a mark and srun named none.
_NOBODY_NAMED = "the ranks ended with code"


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of `KINDS`."""

    name: str
    pattern: str
    """Searched in the words of an end: an exception, how srun calls it, a code of the preflight."""
    lasting: bool | None = None
    """Whether another attempt would end so again; None: the row does not say, and the next one counts."""
    blames_node: bool = True
    """Whether the node of the rank may be at fault."""
    limits: tuple[str, ...] = ()
    """Names of limits of a process, see `slurm.limits`, that it has come to where it has them."""
    advice: str = ""
    """What to do, where none of the limits is at fault; "": the next row counts."""


KINDS: tuple[Kind, ...] = (
    Kind(NODE_FAILURE, "^node failure on "),
    Kind(NOT_CREATED, f"^{NO_STEP}"),
    # The end of a rank that does not handle the warning before the time limit: a script as it is.
    Kind(WARNED, "User defined signal 2"),
    Kind(KILLED, "^Killed$"),
    Kind(
        CRASH,
        "^(?:Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception)",
    ),
    Kind(EXIT, r"^the (?:script|function) ended with code \d+$"),
    # Of a rank that has lost another one, or waited for it: gloo, NCCL, the store, the meeting of the ranks.
    Kind(
        LOST_PEER,
        r"(?i)Connection (?:was likely )?closed|Connection reset|Broken pipe|Socket (?:closed|Timeout)"
        r"|failed to recv, got 0 bytes|communicator was aborted|remote process exited|pair closure"
        r"|connectFullMesh failed|Timed out waiting \d+\s?ms for (?:recv|send)"
        r"|wait timeout after|waiting for clients|did not connect to .*: missing|Watchdog caught collective",
        blames_node=False,
    ),
    # A process of a loader, or a spawned one.
    Kind(
        CHILD_CRASH,
        "killed by signal: (?:Segmentation fault|Aborted|Bus error|Illegal instruction"
        "|Floating point exception)|terminated with signal SIG(?:SEGV|ABRT|BUS|ILL|FPE)",
    ),
    # Codes of the preflight that any nodes would get.
    Kind(
        "unfit",
        r"^(?:WRONG_INTERFACE|RANK_MISMATCH|GPU_COUNT|DATA_MISSING|LIMITS|FS_READONLY|DISK_FULL|NO_COMPILER)\b",
        lasting=True,
    ),
    # What torch says of a GPU without memory, in every release.
    Kind(
        GPU_MEMORY,
        r"OutOfMemoryError|(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|Cuda failure \d* ?'out of memory'",
        advice="out of GPU memory: lower batch.local_size (the global batch stays), or set "
        "parallel.activation_checkpointing=full or parallel.dp_shard=N; `plan --suggest GIB` lists what fits",
    ),
    Kind(
        "locked_memory",
        r"ibv_\w+.*Cannot allocate memory",
        advice="InfiniBand has to lock its buffers in memory: `ulimit -l unlimited` before submitting or in "
        "cluster.setup",
    ),
    Kind("memory", "Out Of Memory|OUT_OF_MEMORY|oom-kill", advice=_RAISE_MEMORY),
    # Not the words of EAGAIN alone: HDF5 says them of a lock, and a socket of its peer.
    Kind(
        "threads",
        "can't start new thread|pthread_create failed|Thread creation failed|fork: .*Resource temporarily",
        limits=("NPROC", "AS", "DATA"),
    ),
    Kind("address_space", _NO_MEMORY, limits=("AS", "DATA"), advice=_RAISE_MEMORY),
    # Of a folder that is mounted noexec it is "Operation not permitted".
    Kind(
        "mapping",
        "failed to map segment from shared object(?!: Operation)",
        limits=("AS", "DATA"),
    ),
    Kind(
        "shared_memory",
        "Bus error.*shared memory|insufficient shared memory|unable to .*shared memory|/dev/shm",
        advice="the node's /dev/shm is full, or what a container has of it: use fewer processes of the loader "
        "(data.num_workers) or smaller batches",
    ),
    Kind(
        "loader_crash",
        "DataLoader worker .*killed by signal: (?:Segmentation|Aborted|Illegal|Floating)",
        advice="the code of the data set, or a library that it calls, has crashed in a process of the loader: its "
        "stacks are in the log of the rank",
    ),
    Kind(
        "loader_killed",
        "DataLoader worker .*(?:killed by signal: Killed|exited unexpectedly)",
        advice="a process of the loader was ended, most often for lack of memory: raise cluster.memory_gb_per_node (0: "
        "all of it), or use fewer of them (data.num_workers)",
    ),
    Kind(
        "open_files",
        "Too many open files|received 0 items of ancdata",
        advice="raise the limit on open files with a line of cluster.setup (ulimit -n 65536), or share the loader's "
        "tensors by torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    Kind(
        "socket_path",
        "AF_UNIX path too long",
        advice="the folder for temporary files has too long a path for sockets below it (107 bytes): "
        "cluster.env.TMPDIR=/tmp, or a line of cluster.setup",
    ),
    Kind(
        "disk_full",
        "Disk quota exceeded|No space left on device",
        advice="make room or raise the quota; caches go elsewhere with cluster.env, e.g. cluster.env.HF_HOME=DIR, "
        "cluster.env.TRITON_CACHE_DIR=/tmp/triton",
    ),
    Kind(
        "stale_file",
        "Stale file handle",
        advice="nodes have written the same file of a shared file system, most often of a cache: give each node its "
        "own, e.g. cluster.env.TRITON_CACHE_DIR=/tmp/triton",
    ),
    # The words before it are those of a broken device.
    Kind(
        "device_assert",
        "device-side assert",
        lasting=True,
        advice="most often an index, a label or a token that is out of range: cluster.env.CUDA_LAUNCH_BLOCKING=1 shows "
        "the line",
    ),
    Kind(
        "collective_timeout",
        "Watchdog caught collective operation timeout",
        advice="a rank did not join this collective in time: the watch over hangs names it if health.hang_timeout_s is "
        "shorter than the group's time-out",
    ),
    Kind(
        "address_in_use",
        "Address already in use|EADDRINUSE",
        advice="let the program take MASTER_ADDR and MASTER_PORT from its environment, which differ from attempt to "
        "attempt",
    ),
    Kind(
        "torchrun_meeting",
        "RendezvousConnectionError|RendezvousTimeoutError",
        advice="the nodes have not met under torchrun, which has no preflight: `doctor` with cluster.launcher=srun "
        "says which node or port is closed",
    ),
    Kind(
        "bus_error",
        "Bus error",
        advice="most often a mapped file has become shorter, its disk has failed, or /dev/shm is full",
    ),
    Kind(
        "cpu_time",
        "CPU time limit exceeded",
        limits=("CPU",),
        advice="the program, or a shell that it runs in, limits its processor time (ulimit -t)",
    ),
    Kind(
        "file_size",
        r"File size limit exceeded|\[Errno 27\]",
        limits=("FSIZE",),
        advice="the program, or a shell that it runs in, limits the size of its files (ulimit -f), or the file system "
        "does",
    ),
    Kind(
        "system_call",
        "Bad system call",
        advice="a filter of system calls (seccomp), of a container or of the site, ends whoever calls what it forbids",
    ),
    Kind(
        "alarm",
        "Alarm clock",
        advice="a timer that the program or a library has set (alarm, setitimer) has run out, and nothing handles it",
    ),
    Kind(
        "instruction",
        "Illegal instruction",
        advice="a library was built for a newer processor than this node's: choose nodes with cluster.constraint or "
        "cluster.exclude",
    ),
    Kind(
        "srun_option",
        "srun: .*option",
        advice="the srun of the job does not know it: a misspelt name, an option of another release, or of a plugin "
        "that is not installed here; leave it out of cluster.srun and container",
    ),
    Kind(
        "cpu_binding",
        "(?i)cpu bind(?:ing outside| request)",
        advice="the CPUs of the job are not those that srun would bind to: cluster.srun.cpu-bind=none",
    ),
    # Failures of devices, networks and files may pass; one node may lack a library, or have an older one.
    Kind(
        "passing",
        r"(?i)CUDA error|AcceleratorError|CUBLAS|cuDNN|NCCL|gloo|Dist\w*Error|Connection|time.?out|OSError"
        r"|cannot open shared object file|GLIBC(?:XX)?_[\d.]+' not found",
        lasting=False,
    ),
)


def kinds_of(words: str) -> list[Kind]:
    """Returns the rows of `KINDS` that some words match, in their order."""
    return [kind for kind in KINDS if re.search(kind.pattern, words)]


def tells_of_loss(words: str) -> bool:
    """Returns whether some words say only that another rank is gone or late, which is the consequence of a failure."""
    # Of this row alone: thousands of ranks may say so.
    return any(kind.name == LOST_PEER and re.search(kind.pattern, words) for kind in KINDS)


def is_lasting(words: str, *, default: bool) -> bool:
    """Returns whether another attempt would end so again; `default` where no row of `KINDS` says so."""
    return next((kind.lasting for kind in kinds_of(words) if kind.lasting is not None), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an attempt ended; `str` gives one line, e.g. "rank 3 on node2: ValueError: no such layer"."""

    kind: str = ""
    """Name of the first row of `KINDS` that its words match, code of a finding, or "hang"; "" for none."""
    ranks: tuple[int, ...] = ()
    """Those that ended first; () where no rank did."""
    node: str = ""
    """Theirs, or the one that was lost; "" for none and for several."""
    words: str
    """What was said of these ranks, or of all where there are none; of a hang the whole sentence."""
    place: str = ""
    """Where an exception was raised, e.g. "model.py:41 in forward"."""
    lasting: bool = True
    """Whether the same exception at the same place would be raised again."""
    blames_node: bool = False
    """Whether the node may be at fault."""

    @classmethod
    def of(
        cls, words: str, *, ranks: Sequence[int] = (), node: str = "", place: str = "", lasting: bool = True
    ) -> Cause:
        """Returns the cause with the kind and the blame that `KINDS` has for its words."""
        kinds = kinds_of(words)
        return cls(
            kind=next((kind.name for kind in kinds), ""),
            ranks=tuple(ranks),
            node=node,
            words=words,
            place=place,
            lasting=lasting,
            blames_node=node != "" and all(kind.blames_node for kind in kinds),
        )

    @classmethod
    def of_lost_nodes(cls, nodes: Sequence[str]) -> Cause:
        """Returns the cause where nodes were lost."""
        return cls.of(f"node failure on {','.join(nodes)}", node=nodes[0] if len(nodes) == 1 else "")

    @classmethod
    def of_hang(cls, event: Mapping[str, Any]) -> Cause:
        """Returns the cause that the event of a hang tells."""
        ranks = tuple(event.get("ranks", ()))
        node = str(event.get("host", ""))
        return cls(kind=HANG, ranks=ranks, node=node, words=str(event["sentence"]), blames_node=node != "")

    @classmethod
    def of_note(cls, note: str) -> Cause | None:
        """Returns who ended first by the note of a failure, None where nobody is named."""
        if not note or _NOBODY_NAMED in note:
            return None
        named = _IN_NOTE.search(note)
        return cls(words=note) if named is None else cls(words=note, ranks=(int(named["rank"]),), node=named["host"])

    def __str__(self) -> str:
        if not self.ranks or self.kind == HANG:
            return self.words
        return f"rank{'s' * (len(self.ranks) > 1)} {ranges(self.ranks)} on {self.node}: {self.words}"

    def adding(self, words: str) -> Cause:
        """Returns the cause with more words at its end; the node that is blamed stays, whatever they are."""
        whole = self.words + words
        return replace(self, words=whole, kind=next((kind.name for kind in kinds_of(whole)), self.kind))

    def is_like(self, other: Cause) -> bool:
        """Returns whether the same exception was raised at the same place, on whatever rank, and will be again."""
        # What torch says about its memory has numbers in it that differ from time to time.
        is_same = self.words == other.words or self.kind == other.kind == GPU_MEMORY
        return self.lasting and self.place == other.place != "" and is_same
