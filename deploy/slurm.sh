#!/bin/bash
# A study in a Slurm allocation: a Ray cluster of its nodes, which ends with the study. docs/deploy.md has more.
#
#   sbatch deploy/slurm.sh my_study.yaml --store /shared/store
#
# The arguments are those of `mlmclm study`. Submitted again, it computes what is missing. Adapt the lines below.
#SBATCH --job-name=mlmclm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# For GPUs:   sbatch --gpus-per-node=4 deploy/slurm.sh ...
set -euo pipefail

# Where mlmclm is installed, on all nodes: source /shared/environment/bin/activate

export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')

# This script runs on the allocation's first node, which is Ray's head and computes, too. Another job may share it.
head=$(getent ahostsv4 "$SLURMD_NODENAME" | awk '{print $1; exit}')
port=$((20000 + 4 * (SLURM_JOB_ID % 3000)))
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "/tmp/mlmclm-$SLURM_JOB_ID"' EXIT

ray start --head --block --node-ip-address="$head" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" \
    --temp-dir="/tmp/mlmclm-$SLURM_JOB_ID" --ray-client-server-port=$((port + 1)) \
    --dashboard-host=127.0.0.1 --dashboard-port=$((port + 2)) --dashboard-agent-listen-port=0 &
until (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; do
    kill -0 $! # or it has ended
    sleep 1
done

others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
        ray start --block --address="$head:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --dashboard-agent-listen-port=0 &
fi

# Pretraining with more workers than the nodes that have joined can hold would be refused.
timeout 600 python - "$head:$port" "$SLURM_JOB_NUM_NODES" <<'PYTHON' &
import sys, time
import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while (joined := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[2]):
    print(f"{joined} of {sys.argv[2]} nodes have joined", flush=True)
    time.sleep(5)
PYTHON
wait -n # for the first to end: all have joined, or one could not start

mlmclm study "$@" --ray "$head:$port"
