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

command -v pgrep >/dev/null || { echo "slurm.sh needs pgrep (procps)" >&2; exit 1; }

export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # Ray ends soon after SIGTERM, because Slurm sends SIGKILL next
export RAY_ENABLE_AUTO_CONNECT=0 # a study that is ending starts no other Ray
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')

# A node: Ray, and a folder that goes with it when this shell ends. Slurm may send SIGTERM more than once.
start_node() {
    folder="/tmp/mlmclm-$SLURM_JOB_ID" # TMPDIR can be a folder that others use, too: sites and Slurm itself change it
    { rm -rf "$folder" && mkdir -m 700 "$folder"; } || exit # it may be another user's
    export TMPDIR="$folder"
    trap end_node EXIT
    trap 'exit 143' TERM
    ray start --block --num-cpus="$SLURM_CPUS_ON_NODE" --dashboard-agent-listen-port=0 "$@" &
}
end_node() {
    trap '' TERM
    jobs -p | xargs -r kill 2>/dev/null || true
    wait
    pgrep -f "$folder/" | xargs -r kill -KILL 2>/dev/null || true # Ray's workers that were starting
    rm -rf "$folder" || true
}
export -f start_node end_node

# This script runs on the allocation's first node, which is Ray's head and computes, too. Another job may share it.
head=127.0.0.1 port=$((20000 + 4 * (SLURM_JOB_ID % 3000))) others=$((SLURM_JOB_NUM_NODES - 1))
on_others=(srun --export=ALL --kill-on-bad-exit --cpu-bind=none --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME")
if [ "$others" -gt 0 ]; then # the address at which they reach this node, which may have several
    head=$("${on_others[@]}" printenv SLURM_LAUNCH_NODE_IPADDR | awk 'NR == 1')
fi

start_node --head --node-ip-address="$head" --port="$port" --temp-dir="/tmp/mlmclm-$SLURM_JOB_ID" \
    --ray-client-server-port=$((port + 1)) --dashboard-host=127.0.0.1 --dashboard-port=$((port + 2))
until (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; do
    kill -0 $! # or it has ended
    sleep 1
done
kill -0 $! # the port may be another program's

if [ "$others" -gt 0 ]; then
    "${on_others[@]}" bash -c "start_node --address=$head:$port; wait \$!" &
    step=$!
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

# When this script ends, Slurm sends SIGTERM to the other nodes' shells. srun is ended first: it would send them SIGKILL.
if [ "$others" -gt 0 ]; then
    disown "$step"
    { pgrep -P "$step" || true; echo "$step"; } | xargs kill -KILL || true # its helper would do the same
fi

mlmclm study "$@" --ray "$head:$port" &
wait $!
