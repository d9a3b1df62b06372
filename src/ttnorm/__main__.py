"""`python -m ttnorm`, which is also what torchrun starts: `torchrun -m ttnorm post-train ...`."""

from .cli import main

main()
