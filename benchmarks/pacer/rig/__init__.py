"""Parts of the pacer benchmark: programs on simulated cards, what is run on them, and what comes out."""
