"""Block-quantised formats: what they are, the casts, and weights held in them."""
