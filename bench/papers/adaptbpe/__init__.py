"""Repeats the measurements of the AdaptBPE paper, and measures what an adapted vocabulary costs a model."""
