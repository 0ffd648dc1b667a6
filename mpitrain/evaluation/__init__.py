"""What a checkpoint is worth: loss of texts and answers to tasks, on any layout.

evaluated_config   the run's model in the layout of this job, for sequences of a length
scorer             rows of tokens through the ranks: sum, likeliest token, whether all were likeliest
windows            a text's tokens as requests, each token scored once
texts              files of documents: loss, perplexity, bits per byte
task_file          lines of JSON: multiple choice, cloze, generation; few-shot contexts
tasks              how their answers are judged
evaluated_run      files and tasks, one after the other; the result
"""
