"""Parts of the pacer benchmark: programs on simulated cards, the measurements, and their results."""
