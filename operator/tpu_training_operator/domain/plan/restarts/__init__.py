"""What follows a failure, and how a gang waits to start."""
