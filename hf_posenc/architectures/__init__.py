"""What a stock model is made of: stacks, position components, and what is not supported, with the reason."""
