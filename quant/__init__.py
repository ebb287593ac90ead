"""Quantization: schemes and grids, RTN, GPTQ, packing, and the formats on disk."""
