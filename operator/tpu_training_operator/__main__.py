"""`python -m tpu_training_operator` runs the operator."""

from tpu_training_operator.main import main

main()
