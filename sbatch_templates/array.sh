#!/bin/bash
# {title}
# Element N is the run in line N + 1 of runs.txt. Works by hand as well: `sbatch submit.sh` (finished runs end at once).
{sbatch}

set -e
mapfile -t -s "${{SLURM_ARRAY_TASK_ID:?this script is for sbatch}}" -n 1 run < {runs}
exec bash "${{run:?there is no such line in runs.txt}}/submit.sh" >> "$run/logs/batch.log" 2>&1
