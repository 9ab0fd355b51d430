"""Training: prepared samples, the loss over base ids and hypertokens, and a loop that can be resumed."""
