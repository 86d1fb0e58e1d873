"""Tools of the maintainers: what of Transformers is supported, pictures and pages of the documentation, kept checkpoints."""
