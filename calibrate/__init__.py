"""Text into token blocks, and the block-by-block replay of a model that gathers statistics on them."""
