"""Child processes of models: their groups, output, memory, and whether they are alive."""
