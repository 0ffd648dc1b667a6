"""What a microbatch leaves behind between its forward and its backward, and what one computation needs.

kept         what a stage keeps of a microbatch: formulas, in bytes
transients   what one computation holds while it runs
peak         the most that all microbatches of a rank hold, played through its program
"""
