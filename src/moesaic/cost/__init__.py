"""Prices: flops and bytes of each operation, machines, and the hierarchical roofline that joins them."""
