"""`python -m tpu_training_operator.cli` is `tpujob`, for the operator's image, which has no program of that name."""

from tpu_training_operator.cli.main import main

main()
