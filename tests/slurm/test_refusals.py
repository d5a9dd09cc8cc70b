"""What sbatch answers: texts of slurm_errno.c and sbatch (20.11 to 26.05), and what filters of sites print."""

from __future__ import annotations

import pytest

from slurm_train.slurm.refusals import Refusal, TestVerdict, read_verdict

LAST = "sbatch: error: Batch job submission failed: "
NONE = ""


def test_an_accepted_script_has_an_estimated_start() -> None:
    text = "sbatch: Job 5 to start at 2026-11-20T09:38:00 using 4 processors on nodes node[1-4] in partition main\n"
    start = "2026-11-20T09:38:00"
    assert read_verdict(0, text) == TestVerdict(is_accepted=True, start=start, nodelist="node[1-4]", partition="main")
    heterogeneous = f"sbatch: Job 34 to start at {start} using 6 processors on node2\n"
    assert read_verdict(0, heterogeneous) == TestVerdict(is_accepted=True, start=start, nodelist="node2")
    newer = text.replace(" using", " a using")
    assert read_verdict(0, newer) == read_verdict(0, text), "as 26.05 prints it"
    assert read_verdict(0, f"{text}\nsbatch:   Preempts: 12,13\n").preempts and not read_verdict(0, text).preempts
    assert read_verdict(0, "") == TestVerdict(is_accepted=True)
    wrapped = read_verdict(0, "", f"Welcome to the lab\n{text}")
    assert wrapped == read_verdict(0, text), "a wrapper has put both streams into one"


def test_a_wrapper_that_loses_the_exit_code_makes_no_yes_of_a_no() -> None:
    verdict = read_verdict(0, "", "allocation failure: Invalid qos specification\n")
    assert (verdict.is_accepted, verdict.refusal) == (False, Refusal.QOS)


# Slurm's message, and what the hint must name: one key or command, in the direction that it says; NONE: there is none.
BY_SLURM = {
    "Time limit specification required, but not provided": "set cluster.time,",
    "Requested time limit is invalid (missing or exceeds some limit)": "set cluster.time, or lower it",
    "Invalid license specification": "cluster.sbatch.licenses",
    "Licenses currently unavailable": "cluster.sbatch.licenses",
    "Invalid Trackable RESource (TRES) specification": "cluster.gpu_type",
    "Invalid wckey specification": "cluster.sbatch.wckey",
    "Job dependency problem": "cluster.sbatch.dependency",
    "Access/permission denied": "AllocNodes",
    "Requested partition configuration not available now": "MinNodes and MaxNodes",
    "Required partition not available (inactive or drain)": "another cluster.partition",
    "Partition in DOWN state": "another cluster.partition",
    "User's group not permitted to use this partition": "another cluster.partition",
    "Job's account not permitted to use this partition (gpu allows x not y)": "set cluster.account",
    "Job's QOS not permitted to use this partition (gpu allows gpu_normal not normal)": "set cluster.qos",
    "Job's account not permitted to use this partition": "set cluster.account",
    "Job's QOS not permitted to use this partition": "set cluster.qos",
    "Required node not available (down, drained or reserved)": "cluster.nodelist",
    "Requested nodes are busy": "cluster.nodelist",
    "Requested nodes not in this partition": "cluster.nodelist",
    "Invalid node name specified": "cluster.nodelist",
    "Requested GRES option unsupported by configured SelectType plugin": "cluster.gpu_flag=gres",
    "Burst Buffer request invalid": "cluster.sbatch.bb",
    "Burst Buffer permission denied": "cluster.sbatch.bb",
    "Memory required by task is not available": "lower cluster.memory_gb_per_gpu",
    "Invalid generic resource (gres) specification": "cluster.gpu_type",
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": "ask for less",
    "Requested node configuration is not available": "MinNodes and MaxNodes",
    "Requested topology configuration is not available": "cluster.nodelist",
    "Node count specification invalid": "more or fewer",
    "More processors requested than permitted": "lower cluster.cpus_per_gpu",
    "I/O error writing script/environment to file": NONE,
    "Invalid job array specification": NONE,
    "Job size specification needs to be provided": "set cluster.nodes",
    "Invalid --network specification": "cluster.sbatch.network",
    "Invalid --time specification": "cluster.time",
    "Task count specification invalid": "set cluster.nodes",
    "Invalid MCS label specification": NONE,
    "Invalid mcs_label specified": "cluster.sbatch.mcs-label",
    "Access to this partition is limited to reservations": NONE,
    "Requested reservation is invalid": "cluster.sbatch.reservation",
    "Access denied to requested reservation": "cluster.sbatch.reservation",
    "Requested operation not supported on this system": NONE,
    "Invalid job credential": NONE,
    "Slurm temporarily unable to accept job, sleeping and retrying": "submit it later",
    "Rate limit exceeded, please retry momentarily": "submit it later",
    "MaxJobCount limit reached": "submit it later",
    "Job's requested CPU count can not be satisfied": NONE,
    "CPU frequency specification invalid": NONE,
    "The requested deadline is not possible / Job deadline reached": NONE,
    "Invalid time specified": "cluster.sbatch.begin",
    "Invalid feature specification": "cluster.constraint",
    "Batch script contains DOS line breaks": NONE,
    "Unable to contact slurm controller (connect failure)": "scontrol ping",
    "Invalid account or account/partition combination specified": "cluster.account",
    "Multiple partition job request not supported when a partition is set in the association": "one partition",
    "Invalid partition name specified": "cluster.partition",
    "No partition specified or system default partition": "cluster.partition",
    "Invalid qos specification": "cluster.qos",
    "Unspecified error": NONE,
    "Immediate execution impossible, insufficient priority": NONE,
    "Invalid cluster name": NONE,
    "Duplicate event": NONE,
    "Invalid time value": NONE,
    "A message of a Slurm to come, about the time limit and gres": NONE,
}


@pytest.mark.parametrize("message", BY_SLURM)
def test_a_message_of_slurm_has_the_hint_of_its_row_or_none(message: str) -> None:
    verdicts = [read_verdict(1, f"{prefix}{message}\n") for prefix in (LAST, "allocation failure: ")]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].message == message
    wanted = BY_SLURM[message]
    assert wanted in verdicts[0].advice
    assert bool(verdicts[0].advice) == bool(wanted)


# What sites print before Slurm's message, that message, and what the hint must and must not name.
OTHER = "Unspecified error"
CONFIGURATION = "Requested node configuration is not available"
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
BY_SITE = [
    ("Job request does not match any supported policy.\nNo architecture specified.", OTHER, "cluster.constraint", ""),
    ("GPU jobs must use a repo ending with _g", OTHER, "cluster.account", "GPUs"),
    ("job_submit: Please specify --time for your job", OTHER, "cluster.time", "lower"),
    (
        "A time limit is required for all jobs.",
        "Time limit specification required, but not provided",
        "cluster.time",
        "lower",
    ),
    (
        "memory limit must be provided for shared jobs",
        "Invalid feature specification",
        "cluster.memory_gb_per_gpu",
        "constraint",
    ),
    ("For ACC partition you have to request 20 CPUs per GPU", CONFIGURATION, "cluster.cpus_per_gpu", "lower"),
    ("Your account has no more resources available", POLICY, "cluster.account", "ask for less"),
    ("QOSMinGRES", POLICY, "raise cluster.gpus_per_node", "lower"),
    ("QOSMaxWallDurationPerJobLimit", POLICY, "lower cluster.time_limit_min", "raise"),
    ("AssocMaxNodePerJobLimit", POLICY, "lower cluster.nodes", "raise"),
    ("QOSMaxSubmitJobPerUserLimit", POLICY, "squeue --me", "lower"),
    ("QOSMinNode", POLICY, "raise cluster.nodes", "lower"),
    ("QOSMinCpuNotSatisfied", POLICY, "raise cluster.cpus_per_gpu", "lower"),
    ("    --> error: requested timelimit exceeds max of 24 hours", POLICY, "cluster.time_limit_min", "squeue"),
    ("Users must specify `--ntasks` or `--mem` for all GPU partitions.", OTHER, "cluster.memory_gb_per_gpu", "sbatch"),
    (
        "Cannot find GPU specification, you may not submit a job not requesting GPUs in a GPU partition",
        OTHER,
        "cluster.gpus_per_node",
        "cluster.partition",
    ),
    ("Jobs on this partition must use all GPUs of a node: use --exclusive", OTHER, "cluster.sbatch.exclusive", "lower"),
    ("please define total core count with the -n option", OTHER, "the ranks", "lower"),
    ("Missing budget: use --comment=project", OTHER, "cluster.sbatch.comment", "cluster.account"),
    ("Your job requests 1 node; partition large needs at least 16 nodes", OTHER, "cluster.nodes", "cluster.partition"),
    ("--mail-user must be a domain address", OTHER, "cluster.sbatch.mail-user", ""),
    ("--export=ALL is not allowed here, use --export=NONE", OTHER, "cluster.export", "sbatch"),
    ("Memory specification can not be satisfied", CONFIGURATION, "lower cluster.memory_gb_per_gpu", "MinNodes"),
    ("CPU count per node can not be satisfied", CONFIGURATION, "lower cluster.cpus_per_gpu", "MinNodes"),
    ("Job requeue disabled", OTHER, "requeue.enabled=false", ""),
    ("Please request a GPU model: --gres=gpu:<model>:<n>", OTHER, "cluster.gpu_type", ""),
    ("You must specify --gpus or --gpus-per-task (ntasks-per-node alone is not enough)", OTHER, "cluster.gpu_flag", ""),
    ("the devel partition takes interactive jobs only", OTHER, "cluster.partition", ""),
    ("Not enough SUs left in project p123", OTHER, "cluster.account", ""),
    ("This does not look like a batch script. The first\nline must start with #!.", OTHER, NONE, ""),
    ("Submitting jobs from directories residing in /home is not permitted on this system.", OTHER, NONE, ""),
    ("Your home directory is over quota, job rejected", OTHER, NONE, ""),
    ("Your password/2FA certificate expired, renew it with sshproxy", OTHER, NONE, ""),
    ("array jobs are limited to 100 tasks per user", OTHER, NONE, ""),
    ("Output path must be on /work", OTHER, NONE, ""),
]


@pytest.mark.parametrize(("words", "last", "named", "not_named"), BY_SITE)
def test_the_words_of_a_site_come_before_those_of_slurm(words: str, last: str, named: str, not_named: str) -> None:
    lines = "".join(f"sbatch: error: {line}\n" for line in words.splitlines())
    verdict = read_verdict(1, f"{lines}{LAST}{last}\n")
    assert all(line.strip() in verdict.message for line in (*words.splitlines(), last)), "all words are shown"
    assert named in verdict.advice
    assert bool(verdict.advice) == bool(named)
    assert not not_named or not_named not in verdict.advice


@pytest.mark.parametrize("banner", ["Welcome to the lab", "Your account has 100 h left; partition gpu is new"])
def test_a_banner_does_not_take_the_place_of_slurms_message(banner: str) -> None:
    refused = f"{LAST}Invalid qos specification\n"
    told = {read_verdict(1, f"{banner}\n{refused}").advice, read_verdict(1, refused, f"{banner}\n").advice}
    assert told == {Refusal.QOS.value}


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (
            "sbatch: error: invalid partition specified: no\nallocation failure: Invalid partition name specified\n",
            "PARTITION",
        ),
        ("sbatch: unrecognized option '--bogus=3'\nTry \"sbatch --help\" for more information\n", "OPTION"),
        ("sbatch: error: Invalid directive found in batch script: x\n", "OPTION"),
        (
            "    [*] Too many simultaneous jobs in queue.\n        --> Max job limits for normal =  50 jobs\n",
            "TOO_MANY_JOBS",
        ),
        ("sbatch: error: the site says no\n", "OTHER"),
        ("", "SILENT"),
    ],
)
def test_what_sbatch_and_wrappers_print_themselves(text: str, refusal: str) -> None:
    verdict = read_verdict(1, text)
    assert (verdict.refusal, verdict.advice) == (Refusal[refusal], Refusal[refusal].value)
    assert verdict.message


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("You may use several accounts.\nName one:\n  lab-one, lab-two\nUse --account=NAME.", "cluster.account"),
        ("Please choose a QoS", "cluster.qos"),
        ("Wall time must not exceed 24 h", "cluster.time_limit_min"),
        ("You must request at least 1 GPU in this partition", "cluster.gpu_type"),
        ("memory per core is limited to 4 GB", "cluster.memory_gb_per_gpu"),
        ("use -C / --constraint to choose nodes", "cluster.constraint"),
        ("Reservation maint starts soon", "cluster.sbatch.reservation"),
        ("Licenses are missing", "cluster.sbatch.licenses"),
        ("Jobs must name a --wckey=PROJECT", "cluster.sbatch.wckey"),
        ("too many nodes", "cluster.nodes"),
        ("Use --nodes=1", "cluster.nodes"),
        ("Use -A <name>", "cluster.account"),
        ("add -C h100 to your command", "cluster.constraint"),
        ("a wckey is required", "cluster.sbatch.wckey"),
        ("Your budget is used up", "cluster.account"),
        ("You must specify --mem-per-cpu, max 3968 MB", "cluster.sbatch.mem-per-cpu"),
        ("a comment is required", "cluster.sbatch.comment"),
    ],
)
def test_words_of_a_site_point_at_settings(words: str, settings: str) -> None:
    for stdout, stderr in ((words, ""), ("", words)):
        error = f"{stderr}\nsbatch: error: Batch job submission failed: Unspecified error\n"
        verdict = read_verdict(1, error, stdout)
        assert settings in verdict.advice
        assert all(line.strip() in verdict.message for line in words.splitlines())


def test_options_that_exclude_each_other_do_not_point_at_whole_nodes() -> None:
    words = "sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.\n"
    advice = read_verdict(1, words).advice
    assert "cluster.memory_gb_per_gpu" in advice and "cluster.sbatch.mem-per-gpu" in advice
    assert "cluster.sbatch.exclusive" not in advice
