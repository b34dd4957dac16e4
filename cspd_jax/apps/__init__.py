"""Programs built on the core, which imports none of them.

`bulk` makes images by the ten thousand, `evaluation` measures them, `paper` reproduces its tables,
and `service` serves many users. `cli` adds their verbs to the command line.
"""
