"""Files in a directory or a bucket."""
