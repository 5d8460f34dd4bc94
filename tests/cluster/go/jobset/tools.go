//go:build tools

// Package tools names the command that tests/cluster/binaries.py builds, so that go.mod and go.sum pin
// everything it needs. It is never compiled itself.
package tools

import _ "sigs.k8s.io/jobset"
