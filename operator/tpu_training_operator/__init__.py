"""Kubernetes operator for data-parallel PyTorch training on Cloud TPU slices.

`api` describes the TPUTrainingJob, `domain` decides, `runtime` acts on a cluster, `local` is a cluster on this
machine, `cli` is the `tpujob` command and `main` the operator process.
"""
