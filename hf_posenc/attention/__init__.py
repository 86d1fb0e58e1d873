"""How rotation and score biases reach an attention function."""
