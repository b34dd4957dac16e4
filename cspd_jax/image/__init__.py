"""Images from models of continuous tokens.

`generation` is the way in; `methods` are the ways to generate; `plan` checks what is asked and resolves it
for this machine; `autotune` finds the fastest exact method. The algorithms: `plain` (the reference),
`chain_speculation` (along the denoising steps of a token), `speculation` (over AR steps), and `released` (the
published runner, lossy). They know models by `protocol` only.
"""
