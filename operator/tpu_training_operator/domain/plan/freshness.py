"""Which plans are carried out only on what the API server says now, and not on what a watch has told so far.

A watch may be late, and the watch of pods may be later than that of jobs. Most plans do not mind: deletions name a uid,
and no status is written over one that was not read. But pods that are not known yet look like pods that are gone. So
whatever replaces, stops, creates or names workers needs the present state of the gang:

- Otherwise a gang that another operator process has just started would be taken for one that has lost its workers.
- Otherwise workers would be created beside those of an earlier attempt.
- Otherwise the workers' names would lead to addresses that others may have by now.
- Otherwise quota would be given back while workers that are not known yet still use the chips.
- Otherwise a worker that ends with its job would be deleted as one that still runs, and its log with it.

A plan that turns its job by nothing but a new status needs only the present pods: the status is not written unless the
job is still the one that was read.
"""

from enum import IntEnum


class Freshness(IntEnum):
    """The reads that a plan must rest on."""

    CACHED = 0
    """Whatever is known."""
    FRESH_PODS = 1
    """The present pods."""
    FRESH_ALL = 2
    """The present job, and the pods read after it."""
