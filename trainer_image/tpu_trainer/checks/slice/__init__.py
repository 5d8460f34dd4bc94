"""The slice check: what `tpujob check-slice` runs in place of the training, and its fast half, which precedes one."""
