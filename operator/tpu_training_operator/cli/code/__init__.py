"""The option `--code`, which packs a folder and puts it where the workers find it."""
