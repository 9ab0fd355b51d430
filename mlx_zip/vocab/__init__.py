"""Learned vocabularies: phrases of a corpus (MultiTok), adapted tokenizers (AdaptBPE), hierarchical patches (H-BPE)."""
