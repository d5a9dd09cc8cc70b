#!/bin/bash
# my-run_1.0/3cdb22f4d308: global batch 64 = 32 local x 2 ranks x 1 accumulation
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=my-run_1.0-3cdb22f4d308
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=6
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --account=lab-7
#SBATCH --qos=high
#SBATCH --time=90
#SBATCH --nodelist='node[1-2],node5'
#SBATCH --exclude='node[7-8]'
#SBATCH --constraint='h100&ib'
#SBATCH --output='/scratch/it'"'"'s mine/runs/my-run_1.0/3cdb22f4d308/logs/batch.log'
#SBATCH --open-mode=append
#SBATCH --chdir=/home/user/project
#SBATCH --no-requeue
#SBATCH --signal=USR2@300
#SBATCH --reservation='maint window'
#SBATCH --exclusive
#SBATCH --mail-type=END,FAIL

set -e
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export NCCL_DEBUG=INFO
export GREETING='it'"'"'s $HOME & more'
export EMPTY=''
cd /home/user/project || echo 'warning: /home/user/project is not on this node: relative paths in cluster.setup lead elsewhere' >&2
set -E; trap 'echo "cluster.setup: exit code $? of: $BASH_COMMAND" >&2' ERR
module load cuda/12.4
source /opt/venv/bin/activate
export EXTRA="$HOME/x y"
trap - ERR; set +E
cd /
exec '/opt/my env/bin/python' -m slurm_train supervise '/scratch/it'"'"'s mine/runs/my-run_1.0/3cdb22f4d308' -- \
  srun --nodes=1 --ntasks=2 --ntasks-per-node=2 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=60 --open-mode=append --export=ALL --output='/scratch/it'"'"'s mine/runs/my-run_1.0/3cdb22f4d308/logs/attempt_{attempt}/rank_%t.log' --cpus-per-task=6 --mpi=none --label \
  '/opt/my env/bin/python' -m slurm_train worker '/scratch/it'"'"'s mine/runs/my-run_1.0/3cdb22f4d308'
