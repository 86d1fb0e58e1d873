"""Functions that change a model's positions: patch, unpatch, convert, extend, from_v4, and to_stock."""
