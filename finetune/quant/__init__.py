"""Post-training quantization: schemes, methods, calibration, block-by-block streaming, writers."""
