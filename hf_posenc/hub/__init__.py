"""Publishing on the Hugging Face Hub: uploads, model cards, and evaluation results."""
