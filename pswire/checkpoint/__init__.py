"""The files of checkpoints: safetensors, a manifest last, in a directory or an object store.

writer              writes a checkpoint; reader reads one
manifest            the file that makes a checkpoint complete
safetensors_stream  writes tensors as they come
storage             directories and object stores
"""
