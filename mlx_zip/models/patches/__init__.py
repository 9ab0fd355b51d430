"""Patch models (Hierarchical BPE): a large model that runs once per patch, and a small decoder of its symbols."""
