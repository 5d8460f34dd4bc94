// Kueue, pinned, for its definitions alone: nothing of it is built.
module tpu-operator.dev/tests/cluster/kueue

go 1.26.0

require sigs.k8s.io/kueue v0.19.2
