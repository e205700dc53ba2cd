"""The colours of all figures. Each has one meaning, and all differ for colour-blind readers too.

Ranks have the first four colours of Okabe and Ito's palette, what a process does has the rest of
it, and the parts of memory have colours of Tol's "muted" palette.
"""

RANKS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # rank 0, 1, 2, 3

COMPUTE = "#56B4E9"  # forward, backward, optimizer step
COMMUNICATE = "#D55E00"  # a collective, or data on the wire
WAIT = "#BFBFBF"  # waiting for another rank, or for data

MEMORY = {
    "weights": "#332288",
    "gradients": "#88CCEE",
    "buckets": "#44AA99",
    "optimizer": "#DDCC77",
    "activations": "#AA4499",
}
