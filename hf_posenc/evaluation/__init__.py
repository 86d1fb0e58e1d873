"""Evaluation of models by input length: retrieval, perplexity, passkeys, and speed."""
