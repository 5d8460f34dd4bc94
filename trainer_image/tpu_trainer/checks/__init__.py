"""Looks at a job before it holds TPUs: the entry check, and the compile check."""
