"""What a model will see of a recipe's data, before it is trained: tokens and their loss, lengths, repeats, leakage."""
