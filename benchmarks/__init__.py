"""What bench.py measures: speed and memory of patched models, side by side with stock ones and with other libraries."""
