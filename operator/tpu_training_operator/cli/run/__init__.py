"""The commands that start a job, and show how it ended: run, submit, report."""
