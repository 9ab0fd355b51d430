"""Patch models (Hierarchical BPE): a large model that runs once per patch, and a small one that writes its symbols."""
