"""What the MultiTok paper measures, repeated: compression of corpora and classifiers."""
