"""What operator and trainer agree on. Both import it, and it imports the standard library alone.

Image and operator may differ in age: `runspec-v1.schema.json` and `history-v1.schema.json` say what a document of a
version holds, whichever version of this package wrote it.
"""
