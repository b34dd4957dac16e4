"""Programs built on the core, which imports none of them.

`bulk` makes images by the ten thousand, `evaluation` measures them, and `paper` reproduces its tables.
`cli` adds their verbs to the command line.
"""
