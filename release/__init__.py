"""The files of a release, made from one commit: `make dist` (docs/releasing.md)."""
