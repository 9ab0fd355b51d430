"""Repeats the measurements of the MultiTok paper: compression of corpora, and classifiers."""
