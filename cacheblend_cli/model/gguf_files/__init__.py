"""Models in GGUF files, as llama.cpp has them.

A file is read once (`conversion`): what its metadata says of the model becomes a directory in the user's cache with the
files a checkpoint of transformers has, and an index of the tensors in place of weights. `tensors` reads those from the file.
"""
