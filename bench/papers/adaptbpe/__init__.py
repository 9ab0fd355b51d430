"""What the AdaptBPE paper measures, repeated, and what an adapted vocabulary costs a model."""
