#!/bin/bash
# gpt-stdlib/3cdb22f4d308: global batch 64 = 2 local x 32 ranks x 1 accumulation
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=gpt-stdlib-3cdb22f4d308
#SBATCH --nodes=4
#SBATCH --ntasks=32
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --output=/home/user/project/runs/gpt-stdlib/3cdb22f4d308/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/user/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
export PYTHONUNBUFFERED=1

cd /
exec /usr/bin/python3 -m slurm_train supervise /home/user/project/runs/gpt-stdlib/3cdb22f4d308 -- \
  srun --nodes=4 --ntasks=32 --ntasks-per-node=8 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=60 --open-mode=append --export=ALL --output='/home/user/project/runs/gpt-stdlib/3cdb22f4d308/logs/attempt_{attempt}/rank_%t.log' \
  /usr/bin/python3 -m slurm_train worker /home/user/project/runs/gpt-stdlib/3cdb22f4d308
