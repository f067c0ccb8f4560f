#!/bin/bash
#SBATCH --job-name=lamina
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8   # one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300     # five minutes before the time is up, Slurm tells every process to save and stop
#SBATCH --requeue
#SBATCH --open-mode=append

# sbatch docs/slurm.sh --placement keel --backbone llama-1.3b --parallel fsdp2 --save-steps 500 --output /shared/runs/keel
# All hosts must share the disk that holds the output folder.

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# The script starts the processes without torchrun, so that Slurm's signal reaches them. If the folder is empty,
# --resume=auto starts a new run.
srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID \
  LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE exec lamina pretrain --resume=auto "$@"' lamina "$@"
code=$?

if [ "$code" = 130 ]; then # the run was interrupted and saved a checkpoint
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
