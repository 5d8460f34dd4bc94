"""The option `--code`: packs a folder and puts it where the workers find it."""
