"""Teaches SmolLM2-135M-Instruct hypertokens; `python -m recipes.smollm2` runs it."""
