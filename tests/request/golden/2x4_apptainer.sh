#!/bin/bash
# gpt-stdlib/ed9b3c8f8242: global batch 64 = 8 local x 8 ranks x 1 accumulation
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=gpt-stdlib-ed9b3c8f8242
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output=/scratch/me/runs/gpt-stdlib/ed9b3c8f8242/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0

cd /
exec /opt/venv/bin/python -m slurm_train supervise /scratch/me/runs/gpt-stdlib/ed9b3c8f8242 -- \
  srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=60 --open-mode=append --export=ALL --output='/scratch/me/runs/gpt-stdlib/ed9b3c8f8242/logs/attempt_{attempt}/rank_%t.log' \
  apptainer exec --nv --bind /opt/venv/lib/python3.11/site-packages/slurm_train:/opt/slurm_train/slurm_train:ro --bind /scratch/me/runs --bind /home/me/project --bind /shared/books --bind /datasets:/data:ro --bind '/local scratch' --pwd /scratch/me/runs/gpt-stdlib/ed9b3c8f8242/code --writable-tmpfs /home/me/project/images/torch.sif env PYTHONPATH=/opt/slurm_train PYTHONNOUSERSITE=1 python3 -m slurm_train worker /scratch/me/runs/gpt-stdlib/ed9b3c8f8242
