"""Studies of what encodings are worth. Nothing outside imports them, other than commands and tests."""
