#!/bin/bash
# sweep-d9a90d74-0: 2 runs
# Element N is the run in line N + 1 of runs.txt. Works by hand as well: `sbatch submit.sh` (finished runs end at once).
#SBATCH --job-name=sweep-d9a90d74-0
#SBATCH --array=0-1
#SBATCH --output=/home/fx/project/runs/sweeps/d9a90d74/arrays/000/logs/%a.log
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --open-mode=append
#SBATCH --chdir=/home/fx/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
mapfile -t -s "${SLURM_ARRAY_TASK_ID:?this script is for sbatch}" -n 1 run < /home/fx/project/runs/sweeps/d9a90d74/arrays/000/runs.txt
script="${run:?there is no such line in runs.txt}/submit.sh"
# It is run before the run itself can look whether somebody else may write what it runs.
if [ -n "$(find /home/fx/project/runs/sweeps/d9a90d74/arrays/000/runs.txt "$run" "$script" -maxdepth 0 \( ! -uid "$EUID" ! -uid 0 -o -perm /022 \) 2>&1)" ]; then
  echo "error: $script is missing, or somebody else owns it or may write it; see: ls -ld $run $script" >&2
  exit 2
fi
exec bash "$script" >> "$run/logs/batch.log" 2>&1
