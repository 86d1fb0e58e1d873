"""Publishing on the Hugging Face Hub: pushes, model cards, results of evaluations."""
