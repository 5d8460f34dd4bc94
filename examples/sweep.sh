#!/bin/sh
# A sweep over learning rates and seeds: one job for each pair, all from one job file.
#
#   examples/sweep.sh run       trains them on this machine, one after the other
#   examples/sweep.sh table     compares what they left in runs/sweep-digits, the best first
#   examples/sweep.sh apply     creates them in a cluster instead, all at once
#   examples/sweep.sh get       compares them there; kubectl delete tpujob -l sweep=digits ends them
#
# Other jobs, rates and seeds: JOB=job.yaml RATES="0.1 0.2" SEEDS=0 examples/sweep.sh run
set -eu

JOB=${JOB:-examples/digits.yaml}
SLICE=${SLICE:-v5litepod-4} # for run; in a cluster the job file's
RATES=${RATES:-0.02 0.05 0.1}
SEEDS=${SEEDS:-0 1}
SWEEP=digits
RESULTS=runs/sweep-$SWEEP

each() {
    for rate in $RATES; do
        for seed in $SEEDS; do "$@"; done
    done
}

train() {
    # A rate at which the training diverges is a result, too: the others go on.
    tpujob run "$JOB" --slice "$SLICE" --output-dir "$RESULTS/lr-$rate-seed-$seed" \
        --set "recipe.optimizer.learningRate=$rate" --set "recipe.seed=$seed" ||
        [ -e "$RESULTS/lr-$rate-seed-$seed/result.json" ]
}

# Each job has its own name, so its own folder below checkpoint.uri.
create() {
    kubectl patch --local --filename "$JOB" --type merge --output yaml --patch "
metadata:
  name: $SWEEP-lr-$(echo "$rate" | tr . -)-seed-$seed
  labels: {sweep: $SWEEP}
spec:
  recipe:
    seed: $seed
    optimizer: {learningRate: $rate}
" | kubectl apply --filename -
}

table() {
    python3 - "$RESULTS" <<'PYTHON'
import json, pathlib, sys

results = {file.parent.name: json.loads(file.read_text()) for file in pathlib.Path(sys.argv[1]).glob("*/result.json")}
for name in sorted(results, key=lambda name: (-results[name]["metrics"].get("accuracy", 0), name)):
    result = results[name]
    numbers = "  ".join(f"{metric} {value:.4f}" for metric, value in result["metrics"].items())
    print(f"{name:24} {result['state']:10} {numbers}")
PYTHON
}

case ${1:-} in
run)
    each train
    table
    ;;
table) table ;;
apply) each create ;;
get) kubectl get tpujob --selector "sweep=$SWEEP" --output custom-columns=NAME:.metadata.name,STATE:.status.state,\
RATE:.spec.recipe.optimizer.learningRate,SEED:.spec.recipe.seed,LOSS:.status.progress.metrics.loss,\
ACCURACY:.status.progress.metrics.accuracy ;;
*)
    echo "usage: $0 run | table | apply | get" >&2
    exit 2
    ;;
esac
