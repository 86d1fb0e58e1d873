"""The structure of original models: encoders and decoders, their positional components, and why a model is unsupported."""
