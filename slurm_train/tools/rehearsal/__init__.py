"""Rehearsals: does a program come back from a preemption? Found out in minutes, by ordinary runs of it.

A rehearsal is a folder with a set of ordinary runs of the same words, each with a copy of the person's folder and a
root of runs of its own. One is undisturbed; every other has one `Disturbance`, and is then started again by the same
words, as Slurm would start its job. `marks` reads which steps a run took and their losses, from its reports to the
session where there are any, else from its log. `case` starts a run, waits for the moment, sends the signals that Slurm
would send, and waits for the end; `folder` copies the person's folder and says which files a run has written. The
run's own supervisor judges each end, by the ledger. `verdict` compares a disturbed run with the undisturbed one, whose
twin tells how much two undisturbed runs differ: a row, and for a row that is not good one sentence on what to change.

    words -> plan -> undisturbed run -> moments -> disturbed runs, some at a time -> rows -> table, JSON, page

On this machine the signals go to the processes of the ranks, as with proctrack/cgroup; in an allocation to the step of
the ranks, by scancel. Nothing is simulated but the preempting job: ranks, sessions, saves, watch and supervisor are
those of every run. What a rehearsal does not do: it starts no training to its end, and requeues no job.
"""
