"""Fairlead: a language-model server that gives every user a fair turn."""
