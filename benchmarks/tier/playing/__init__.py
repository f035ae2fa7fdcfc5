"""Parts of the tier's live bench: programs on simulated cards, and their times."""
