"""How models are measured, and the records of what was measured."""
