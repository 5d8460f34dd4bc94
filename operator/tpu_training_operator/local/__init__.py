"""Runs a job on this machine: an object store behind the `Cluster` protocol, and a kubelet for processes."""
