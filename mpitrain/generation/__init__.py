"""Text from a checkpoint, on one rank and without MPI.

text_sampler    the model, the tokenizer and the ends of a run directory; text after each prompt
decoding        logits of the next token, from a key-value cache or a pass over the text
sampling        which token comes next; text that a stop string ends
"""
