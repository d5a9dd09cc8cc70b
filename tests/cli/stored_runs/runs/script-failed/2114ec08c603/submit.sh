#!/bin/bash
# script-failed/2114ec08c603: own2.py on 1 ranks
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=script-failed-2114ec08c603
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output=/home/fx/project/runs/script-failed/2114ec08c603/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/fx/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
export PYTHONUNBUFFERED=1

cd /
exec /home/fx/slurm_train/.venv/bin/python -m slurm_train supervise /home/fx/project/runs/script-failed/2114ec08c603 -- \
  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=0 --open-mode=append --export=ALL --output='/home/fx/project/runs/script-failed/2114ec08c603/logs/attempt_{attempt}/rank_%t.log' --cpus-per-task=1 \
  /home/fx/slurm_train/.venv/bin/python -m slurm_train worker /home/fx/project/runs/script-failed/2114ec08c603
