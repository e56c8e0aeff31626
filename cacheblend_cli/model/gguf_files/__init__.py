"""Models in llama.cpp's GGUF files.

A file is converted once (`conversion`): its metadata becomes a directory in the user's cache with the files of a
transformers checkpoint, and an index of the tensors instead of weights. `tensors` reads the weights from the file.
"""
