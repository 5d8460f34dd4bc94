// The first process of every pod, of the standard library alone.
module tpu-operator.dev/tests/cluster/pause

go 1.25.0
