"""The TPUTrainingJob as users write and read it: models, rules, conditions, and the CRD generated from them."""
