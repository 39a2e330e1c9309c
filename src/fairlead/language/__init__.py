"""Text and its form: checkpoints' descriptions, tokenizers, templates, structured answers. No Trio."""
