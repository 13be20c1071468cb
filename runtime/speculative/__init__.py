"""Speculation: several tokens for one read of the weights, and the tokens that there would be without it."""
