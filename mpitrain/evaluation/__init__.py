"""What weights are worth: loss of texts and answers to tasks, on any layout.

scorer      rows of tokens through the ranks: sum, likeliest token, whether all were likeliest
windows     a text's tokens as requests, each token scored once
texts       files of documents: loss, perplexity, bits per byte
task_file   lines of JSON: multiple choice, cloze, generation; few-shot contexts
vocabulary  how texts become tokens, with the special tokens of a run
tasks       how their answers are judged
"""
