"""What communication costs: accounts of axes, clocks, and the measured speed of links."""
