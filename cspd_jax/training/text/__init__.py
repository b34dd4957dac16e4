"""The training objectives of language models, and the rows that they learn from."""
