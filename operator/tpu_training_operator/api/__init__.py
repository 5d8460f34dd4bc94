"""The TPUTrainingJob as users write it and read it: models, rules, conditions, and the CRD made from them."""
