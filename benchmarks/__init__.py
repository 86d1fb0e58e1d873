"""Speed and memory benchmarks of patched models, compared with original models and other libraries."""
