#!/bin/bash
# requeued/74f16e979924: global batch 16 = 16 local x 1 ranks x 1 accumulation
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=requeued-74f16e979924
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output=/home/fx/project/runs/requeued/74f16e979924/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/fx/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
export PYTHONUNBUFFERED=1

cd /
exec /home/fx/slurm_train/.venv/bin/python -m slurm_train supervise /home/fx/project/runs/requeued/74f16e979924 -- \
  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=60 --open-mode=append --export=ALL --output='/home/fx/project/runs/requeued/74f16e979924/logs/attempt_{attempt}/rank_%t.log' --cpus-per-task=1 \
  /home/fx/slurm_train/.venv/bin/python -m slurm_train worker /home/fx/project/runs/requeued/74f16e979924
