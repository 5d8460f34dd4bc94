"""What a run reports: the log, progress reports to the operator, the history and event files."""
