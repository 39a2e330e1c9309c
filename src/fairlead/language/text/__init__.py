"""Conversion of text to tokens and back: tokenizer, chat template, detokenizer, stop strings."""
