"""Rows of hypertokens: the encoders that make them, the store that keeps them, and the state that a request owns."""
