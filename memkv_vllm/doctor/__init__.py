"""What an operator would look at before asking why it is slow, refused or absent; behind ``memkv doctor``.

``gathering`` finds facts out, each within a deadline; the other modules are functions of those facts and return
findings: what was seen, whether it is right, and what to do.
"""
