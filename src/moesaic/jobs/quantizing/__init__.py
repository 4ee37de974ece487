"""`moesaic quantize`: writes a checkpoint in int8 or int4, layer by layer, and measures what that costs."""
