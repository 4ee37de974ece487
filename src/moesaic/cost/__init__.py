"""Prices operations: their flops and bytes, machines, and the hierarchical roofline that joins them."""
