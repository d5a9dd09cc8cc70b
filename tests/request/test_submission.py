from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.request import submission
from slurm_train.request.submission import UnreadAnswer, submit_request
from slurm_train.slurm.job_request import JobRequest
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.refusals import refusal

SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\necho $HOME\n"
REQUEST = JobRequest.of_script(SCRIPT)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmPrograms:
    slurm = SlurmPrograms(tmp_path / "bin")
    monkeypatch.setenv("PATH", slurm.path)
    return slurm


def answers(slurm: SlurmPrograms, out: str) -> None:
    (slurm.folder / "job_id").write_text(out)


@pytest.mark.parametrize("out", ["4711;cluster\n", "Welcome to the site, 3 messages\n4711\n"])
def test_sbatch_gets_the_script_as_it_is_and_its_answer_is_read(out: str, slurm: SlurmPrograms, tmp_path: Path) -> None:
    answers(slurm, out)
    before = os.umask(0)
    try:
        assert submit_request(REQUEST, folder=tmp_path / "logs" / "submitted", env=os.environ) == "4711"
    finally:
        os.umask(before)
    assert slurm.said("submitted.sh") == SCRIPT
    assert (slurm.said("submitted_words") or "").split()[:-1] == ["--parsable"]
    # What a link's own mode says counts for nobody.
    kept = [path for path in (tmp_path / "logs" / "submitted").iterdir() if not path.is_symlink()]
    assert kept and not [path for path in (kept[0].parent, *kept) if path.stat().st_mode & 0o077], "it is private"


def test_a_job_that_went_to_another_cluster_is_cancelled_there(slurm: SlurmPrograms, tmp_path: Path) -> None:
    answers(slurm, "4711;gpu2\n")
    with pytest.raises(ClusterError, match="sbatch gave the job to cluster gpu2 as job 4711, which is cancelled"):
        submit_request(REQUEST, folder=tmp_path / "submitted", env=os.environ)
    assert slurm.said("cancelled") == "--clusters=gpu2 4711\n"


def test_of_the_environment_only_what_is_given_and_may_travel_reaches_sbatch(
    slurm: SlurmPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = ["SLURM_JOB_ID", "SBATCH_PARTITION", "RANK", "WANDB_API_KEY", "LD_PRELOAD", "NOT_NAMED"]
    kept = ["SLURM_CONF", "NCCL_DEBUG", "MY_OWN", "HF_TOKEN"]
    monkeypatch.setenv("PYTHONPATH", "of the process")
    monkeypatch.setenv("NCCL_DEBUG", "of the process")
    env = {"PATH": os.environ["PATH"], **dict.fromkeys((*withheld, *kept), "given")}
    submit_request(REQUEST, folder=tmp_path / "submitted", env=env, export=["MY_*", "HF_TOKEN"])
    seen = dict(line.split("=", 1) for line in (slurm.said("submitted_env") or "").splitlines() if "=" in line)
    found = {name: seen[name] for name in (*withheld, *kept, "PYTHONPATH") if name in seen}
    assert found == dict.fromkeys(kept, "given")


def test_a_token_of_slurms_commands_reaches_sbatch_and_no_job(slurm: SlurmPrograms, tmp_path: Path) -> None:
    travels = tmp_path / "travels"
    cat = f'cat "${{{{word#*=}}}}" > {travels}'
    slurm.wrap("sbatch", f'for word; do case $word in --export-file=*) {cat};; esac; done; {{real}} "$@"')
    env = {"PATH": os.environ["PATH"], "SLURM_JWT": "eyJ", "MY_TEXT": "two\nlines", "MY_KEY": "k", "EDITOR": "vi"}
    submit_request(REQUEST, folder=tmp_path / "submitted", env=env, export=["MY_*", "SLURM_JWT"])
    assert "SLURM_JWT=eyJ" in (slurm.said("submitted_env") or "").splitlines()
    variables = dict(text.split("=", 1) for text in travels.read_text().split("\0") if text)
    assert variables == {"PATH": env["PATH"], "MY_TEXT": env["MY_TEXT"]}
    assert not [path for path in (tmp_path / "submitted").iterdir() if "eyJ" in path.read_text()]


SITES = {
    # A wrapper whose sentence stands in the place of the id.
    "sentence": 'id=$({real} "$@") || exit; echo "Submitted batch job $id on cluster lab"',
    "sentence without a cluster": 'id=$({real} "$@") || exit; echo "Submitted batch job $id"',
    "sentence of the site's own": 'id=$({real} "$@") || exit; echo "Your job is in the queue as no. $id"',
    "nothing at all": '{real} "$@" > /dev/null',
    "another number before it": 'echo 1000; {real} "$@"',
    "another number after it": '{real} "$@"; echo 12',
    "a failure after it": '{real} "$@"; exit 1',
    "an answer that is lost": '{real} "$@" > /dev/null; echo "sbatch: error: Socket timed out" >&2; exit 1',
}


@pytest.mark.parametrize("body", SITES.values(), ids=SITES)
def test_a_job_that_is_in_the_queue_was_submitted_whatever_is_printed(
    body: str, slurm: SlurmPrograms, tmp_path: Path
) -> None:
    slurm.queue_scripts()
    slurm.wrap("sbatch", body)
    (slurm.folder / "squeue.out").write_text("")
    assert submit_request(REQUEST, folder=tmp_path / "submitted", env=os.environ) == "4711"
    assert slurm.said("cancelled") is None


def test_of_several_numbers_the_last_counts_where_slurm_knows_none(slurm: SlurmPrograms, tmp_path: Path) -> None:
    answers(slurm, "1000\n...\n60060368\n")
    assert submit_request(REQUEST, folder=tmp_path / "submitted", env=os.environ) == "60060368"


@pytest.mark.parametrize(
    "program",
    ["echo your job is in the queue", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"],
)
def test_what_may_be_in_the_queue_is_no_refusal(
    program: str, slurm: SlurmPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_PAUSE_S", 0.0)
    (slurm.folder / "sbatch").write_text(f"#!/bin/sh\n{program}\n")
    error = refusal(UnreadAnswer, submit_request, REQUEST, folder=tmp_path / "submitted", env=os.environ)
    assert error.message.startswith("whether Slurm has the job is not known")
    (script,) = (tmp_path / "submitted").iterdir()
    assert script.read_text() == SCRIPT and str(script) in error.hint


@pytest.mark.parametrize(
    ("program", "message", "hint"),
    [
        (
            "printf 'sbatch: error: first\nsbatch: error: Invalid qos\n' >&2; exit 1",
            "sbatch refused the job: first; Invalid qos",
            "cluster.qos",
        ),
        ("exit 1", "sbatch refused the job: sbatch gave no reason", "by hand"),
        (
            "printf -- '--> Checking\n    [*] Unknown account\n'; echo 'sbatch: error: no' >&2; exit 1",
            "sbatch refused the job: \n    --> Checking\n        [*] Unknown account\n    no",
            "cluster.account",
        ),
        ("echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1", "Unable to", ""),
    ],
)
def test_a_refusal_is_an_error_with_all_words_of_slurm_and_the_site(
    program: str, message: str, hint: str, slurm: SlurmPrograms, tmp_path: Path
) -> None:
    (slurm.folder / "sbatch").write_text(f"#!/bin/sh\n{program}\n")
    error = refusal(ClusterError, submit_request, REQUEST, folder=tmp_path / "submitted", env=os.environ)
    assert message in error.message and hint in error.hint
    assert not isinstance(error, UnreadAnswer)
    assert list((tmp_path / "submitted").iterdir()) == []


def test_a_job_of_another_cluster_that_cannot_be_cancelled_is_not_forgotten(
    slurm: SlurmPrograms, tmp_path: Path
) -> None:
    answers(slurm, "4711;gpu2\n")
    (slurm.folder / "scancel").write_text("#!/bin/sh\necho scancel: error: no such cluster >&2; exit 1\n")
    error = refusal(UnreadAnswer, submit_request, REQUEST, folder=tmp_path / "submitted", env=os.environ)
    assert "no such cluster" in error.message and "scancel --clusters=gpu2 4711" in error.hint
