"""Hierarchical BPE (arXiv 2510.15517): splits the tokens of any tokenizer into short patches of symbols."""
